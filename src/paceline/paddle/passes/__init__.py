"""One backward pass: hooks, weights and sparse gradients of a layer. Imports `link` and `model`.

Not public.
"""
