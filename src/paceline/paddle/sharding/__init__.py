"""One model of Paddle's for all ranks of a host, and an optimizer of which each rank does a part.

What `paceline.sharding` asks of Paddle's tensors (`ops`), optimizers (`optimizer_steps`) and gradients
(`scattered_gradients`); what can't be shared, and `share()` (`shared_storage`); the optimizer that users hold
(`sharded_optimizer`), its arguments (`groups`), and the names in its state (`whole_state`).

Not public.
"""
