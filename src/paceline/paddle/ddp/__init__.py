"""The wrappers: `DataParallel`, and the same under torch's names. Imports every room but `bench`.

Not public.
"""
