"""An optimizer's step that the ranks share, and parameters of which each host has one copy.

Which rank updates which elements, and what ranks compare before a step (`shared_step`, `step_barriers`);
where shared parameters lie (`shared_parameters`), and what a lost rank leaves behind (`partial_steps`);
gradients of which each rank has a part (`scattered_gradients`).

Framework-free. Not public.
"""
