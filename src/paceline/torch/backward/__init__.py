"""One backward pass: hooks, graphs, weights and late gradients of a module.

Not public.
"""
