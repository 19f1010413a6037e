"""What is wrapped: the layer's parameters, and the arguments that say how.

Not public.
"""
