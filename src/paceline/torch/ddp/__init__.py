"""The wrapper: `DistributedDataParallel`, and what it takes over from torch's class.

Imports every room but `backend` and `bench`. Not public.
"""
