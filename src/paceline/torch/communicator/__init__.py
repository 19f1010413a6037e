"""What lies between the ranks: communicators, the process groups below them, and the arena of gradients.

Not public.
"""
