"""One model of Paddle's for all ranks of a host, and an optimizer of which each rank does a part.

Steps of Paddle's optimizers (`optimizer_steps`) and pieces as parameters of their own (`piece_parameters`);
`share()` (`shared_storage`); the optimizer that users hold (`sharded_optimizer`), its arguments
(`param_groups`), and the names in its state (`state_names`).

Not public.
"""
