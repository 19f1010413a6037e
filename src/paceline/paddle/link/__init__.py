"""What lies between the ranks: links, Paddle's groups below them, and the arena of gradients.

Not public.
"""
