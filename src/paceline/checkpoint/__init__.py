"""The state of a training run, which another run goes on with.

What belongs to it (`training_state`), random numbers (`random_states`), and what all this asks of a framework
(`checkpoint_ops`).

Framework-free. Not public.
"""
