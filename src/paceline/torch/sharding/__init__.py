"""One model for all ranks of a host, and an optimizer of which each rank does a part, for torch.

What `paceline.sharding` asks of torch's tensors (`ops`), optimizers (`optimizer_steps`) and gradients
(`scattered_gradients`); what can't be shared, and `share()` (`shared_storage`); the optimizer that users hold
(`sharded_optimizer`), and its arguments (`groups`).

Not public.
"""
