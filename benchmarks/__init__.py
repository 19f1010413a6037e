"""Benchmarks of Paceline and of the libraries that people use today, on this machine. Not in the wheel.

    python -m benchmarks step --help        each benchmark is a file of this folder

A benchmark has cases: Paceline, Gloo, Open MPI or torch's DDP, each with its options. A case is a job with
its own processes, one per rank (`job`), in which a worker runs the measured code (`workers`). The runner
(`runner`) has a socket to each process, and lets one job at a time take one sample, in turn: A B C A B C. So
other load on the machine slows all cases alike, and a case that fails or hangs removes only itself from the
table. The result of every case is checked before it is timed.
"""
