"""What runs where there is a GPU: `make gpu-check`, or `python -m tests.gpu`.

    machine     what is missing here, in one sentence; what the GPU is
    parts       the parts of a check, each a process with a deadline of its own
    models      a toy, a CNN of 25 million parameters, a GPT of 100 million; each has a small form for a CPU
    steps       one rank of a bench: training steps in interleaved rounds, and the curves of the loss
    report      the table that goes to benchmarks/results
    __main__    runs all parts and writes the report

Every program takes the device as an argument and runs with "cpu" as well: test_gpu_check.py runs all of it
there, so that the first run on a GPU meets no misspelt name.
"""
