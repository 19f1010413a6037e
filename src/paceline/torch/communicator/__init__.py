"""What lies between the ranks: communicators, the process groups below them, and the gradient buffer.

Not public.
"""
