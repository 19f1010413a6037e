"""Records backward passes on every rank, and derives timelines, tables and slow ranks from the recordings.

Not public. Users call `paceline run --trace`, `paceline trace`, and `trace()` of a wrapped model. Only
`recording.py`, and `logged.py` above it, need the core. The other modules read files, so that a launcher,
which does not load numpy, can use them.
"""
