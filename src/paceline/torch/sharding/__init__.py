"""One model for all ranks of a host, and an optimizer of which each rank does a part, for torch.

Steps of torch's optimizers (`optimizer_steps`); `share()` (`shared_storage`); the optimizer that users hold
(`sharded_optimizer`), and its arguments (`param_groups`).

Not public.
"""
