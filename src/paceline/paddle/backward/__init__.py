"""One backward pass: hooks, weights and sparse gradients of a layer.

Not public.
"""
