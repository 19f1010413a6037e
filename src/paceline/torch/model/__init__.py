"""What is wrapped: the module's parameters, and the arguments that say how.

Not public.
"""
