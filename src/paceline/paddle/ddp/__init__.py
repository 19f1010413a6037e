"""The wrappers: `DataParallel`, and `DistributedDataParallel` with torch's signature.

Not public.
"""
