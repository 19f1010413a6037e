"""What is wrapped: the layer's parameters, and the arguments that say how. Imports no other room.

Not public.
"""
