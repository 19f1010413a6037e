"""Measurements of Paceline beside the libraries that people use today, on this machine. Not in the wheel.

    python -m benchmarks step --help        each benchmark is a file of this folder

A benchmark has cases: Paceline, Gloo, Open MPI or torch's DDP, each with its options. A case is a job of
processes of its own, one per rank (`job`), in which a worker holds what is measured (`workers`). The runner
(`runner`) has a socket to each of them, lets one job at a time take one sample, and goes round: A B C A B C.
So other load on the machine slows all of them alike, and a case that fails or hangs takes only itself out of
the table. Every case is checked for a right result before it is timed.
"""
