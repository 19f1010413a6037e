"""One backward pass of a wrapped model, from its first gradient to the means, whatever the framework.

`backward_sync` is the state machine; `front_end` is what it asks of a framework; the others each know one
thing of a backward: its phase and state, its plan, its weights, its figures, its log.

Not public.
"""
