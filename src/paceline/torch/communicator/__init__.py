"""Communicators between ranks, the process groups below them, and the transports of gradients.

Not public.
"""
