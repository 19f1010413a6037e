"""One backward pass of a wrapped model, from its first gradient to the means, whatever the framework.

`backward_sync` is the state machine; `front_end` is what it asks of a framework; the others each know one
thing of a backward: its state, what is left over at its end, its weights, its log.

Not public.
"""
