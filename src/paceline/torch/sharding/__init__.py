"""One model for all ranks of a host, and an optimizer of which each rank does a part, for torch.

What `paceline.sharding` asks of torch's tensors (`tensor_ops`), optimizers (`optimizer_steps`) and gradients
(`gradient_stand_in`); what can't be shared, and `share()` (`shared_storage`); the optimizer that users hold
(`sharded_optimizer`), and its arguments (`param_groups`).

Not public.
"""
