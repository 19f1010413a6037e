"""The wrapped layer: its parameters and buffers, and the arguments of the wrapper.

Not public.
"""
