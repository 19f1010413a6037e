"""Local SGD: replicas that train on their own for some steps and then meet.

May import `passes` and the files beside this folder. Not public.
"""
