"""The wrapped module's parameters and buffers, and the arguments of the wrapper.

Not public.
"""
