"""How processes find each other, and which of them share a host.

An `Exchange` hands bytes around between ranks that have nothing in common yet but an address; `shared_memory`
turns it into memory that the ranks of a host share. Not public.
"""
