"""One model of Paddle's for all ranks of a host, and an optimizer of which each rank does a part.

What `paceline.sharding` asks of Paddle's tensors (`tensor_ops`), optimizers (`optimizer_steps`) and gradients
(`gradient_stand_in`); what can't be shared, and `share()` (`shared_storage`); the optimizer that users hold
(`sharded_optimizer`), its arguments (`param_groups`), and the names in its state (`state_names`).

Not public.
"""
