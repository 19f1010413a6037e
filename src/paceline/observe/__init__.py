"""What happened in a job: stacks of its ranks, and the bench.

May import errors, config and env. `observe/bench` is a layer of its own, above all that it measures.
"""
