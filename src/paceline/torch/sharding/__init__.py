"""One model for all ranks of a host: parameters that all read in the same memory, and an optimizer of which
each rank does a part.

What lives here: who holds which parameter (`shared_storage`), how parameters move there (`moving`), what is
refused (`guards`), `share()`, and `ShardedOptimizer`, which also serves parameters that each rank has a copy
of.

Not public.
"""
