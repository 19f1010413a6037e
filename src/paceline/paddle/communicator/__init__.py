"""The communicators between the ranks, the groups of Paddle that they use, and how ranks find each other.

Not public.
"""
