"""One model of Paddle's for all ranks of a host, and an optimizer of which each rank does a part.

What lives here: where shared parameters lie (`shared_storage`, `guards`), what `paceline.sharding` asks of
Paddle (`elementwise`, `shards`, `travel`, `optimizer_journal`), the arguments (`groups`), the state
(`whole_state`), `ShardedOptimizer` and `share()`.

Not public.
"""
