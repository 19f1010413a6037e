"""The state of a training run, which another run goes on with.

What belongs to it (`training_state`), random numbers (`random_states`), and what all this asks of a framework
(`checkpoint_ops`). When it is saved and resumed from (`checkpointer`), the files (`folder`), and the process
that writes them (`writer`, started by `writer_process`) from a copy in memory (`snapshot`).

Framework-free. Not public.
"""
