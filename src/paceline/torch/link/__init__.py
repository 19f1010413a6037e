"""What lies between the ranks: links, the process groups below them, and the arena of gradients.

Not public.
"""
