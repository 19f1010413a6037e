"""The group: collectives on numpy arrays over the memory that the ranks of a host share.

`group` has the class that users hold. `failures` turns failures of the core into errors. Not public.
"""
