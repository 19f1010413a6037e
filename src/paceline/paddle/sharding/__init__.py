"""Paddle's part of sharing one model between the ranks of a host, and of the sharded optimizer.

`sharded_optimizer` is the optimizer that users hold, `param_groups` checks its arguments, and `state_names`
maps its state to names. `optimizer_steps` runs Paddle's optimizers for trials and for a journal,
`piece_parameters` makes parameters of pieces, and `shared_storage` has `share()`.

Not public.
"""
