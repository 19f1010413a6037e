"""From parameters to averaged gradients, without any framework.

Not public.
"""
