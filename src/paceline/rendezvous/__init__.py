"""How processes find each other at start-up, and which of them share a host. Not public.

An `Exchange` gathers bytes from ranks that have nothing in common yet but an address. `shared_memory` uses it
to set up the memory that the ranks of a host share.
"""
