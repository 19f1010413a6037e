"""What lies between the ranks: communicators, Paddle's groups below them, and the arena of gradients.

Not public.
"""
