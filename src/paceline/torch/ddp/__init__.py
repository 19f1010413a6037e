"""The wrapper: `DistributedDataParallel`, and the names that it has in common with torch's class.

Not public.
"""
