"""An optimizer's step that the ranks share, and parameters of which each host has one copy.

Which rank updates which elements (`cuts`, `shards`), and the course of a step (`sharded_steps`,
`shared_step`, `step_barriers`, `journal`); where shared parameters lie (`shared_parameters`), and what a lost
rank leaves behind (`partial_steps`); gradients of which each rank has a part (`scattered_gradients`).

Not public.
"""
