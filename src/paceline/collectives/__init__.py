"""The group: collectives on numpy arrays over the memory that the ranks of a host share.

`group` is what users hold; `failures` words the core's errors. Not public.
"""
