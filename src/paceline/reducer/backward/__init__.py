"""One backward pass of a wrapped model, from its first gradient to the means, whatever the framework.

`backward_sync` is the state machine, and `front_end_interface` its interface to a framework. Each other
module handles one aspect of a backward: its phase and state, its plan, its weights, its figures, its log.

Not public.
"""
