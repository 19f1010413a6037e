"""The backward of a module: hooks, graphs, weights and deferred gradients.

Not public.
"""
