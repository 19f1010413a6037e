"""What is wrapped: the module's parameters, and the arguments that say how. Imports no other room.

Not public.
"""
