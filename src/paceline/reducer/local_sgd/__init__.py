"""Local SGD: replicas that train on their own for some steps and then meet.

Not public.
"""
