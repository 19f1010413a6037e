"""Local SGD: replica groups that train on their own for some steps, and then synchronise.

Not public.
"""
