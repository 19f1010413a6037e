"""What ranks record of their backward passes, and what can be read out of it: timelines, tables, who is slow.

Not public. Users call `paceline run --trace`, `paceline trace`, and `trace()` of a wrapped model. Only
`recording.py` needs the core; all else reads files, so that a launcher, which does not load numpy, can.
"""
