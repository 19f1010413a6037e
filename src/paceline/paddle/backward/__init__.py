"""Paddle's part of a backward: hooks, weights and sparse gradients of a layer.

Not public.
"""
