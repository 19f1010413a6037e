"""The wrapper: `DistributedDataParallel`, and what it takes over from torch's class.

Not public.
"""
