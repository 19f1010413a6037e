"""The state of a training run, with which another run resumes.

`training_state` collects and loads the state, with `random_states`. `checkpoint_ops` declares the operations
that each framework implements. `checkpointer` decides when to save, and resumes. `folder` manages the files.
`writer` is the process that writes them, started by `writer_process`, from a copy in memory (`snapshot`).

Framework-free. Not public.
"""
