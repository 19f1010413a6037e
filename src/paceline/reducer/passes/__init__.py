"""One backward pass of a wrapped model, from its first gradient to the means, whatever the framework.

`passes` is the state machine; `front_end` is what it asks of a framework; the others each know one thing of a
pass: its state, what is left over at its end, its weights, its log.

Not public.
"""
