"""Optimizer steps that are split over the ranks, and parameters of which each host has one copy.

`partition` and `shards` decide which rank updates which elements. `sharded_steps`, `shared_step`,
`step_barriers` and `journal` make a step. `shared_parameters` holds shared parameters, `partial_steps`
records what a lost rank left half written, and `scattered_gradients` holds gradients of which each rank has a
part.

Not public.
"""
