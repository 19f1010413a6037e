"""What lies between the ranks: communicators, Paddle's groups below them, and the gradient buffer.

Not public.
"""
