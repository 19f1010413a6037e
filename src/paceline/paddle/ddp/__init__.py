"""The wrappers: `DataParallel`, and the same under torch's names.

Not public.
"""
