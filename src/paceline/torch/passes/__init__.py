"""One backward pass: hooks, graphs, weights and late gradients of a module. Imports `link` and `model`.

Not public.
"""
