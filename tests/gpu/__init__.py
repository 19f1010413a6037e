"""What runs where there is a GPU: `make gpu-check`, or `python -m tests.gpu`.

    machine     what is missing here, in one sentence; what the GPU is
    parts       the parts of a check, each of one or several processes, with a deadline of its own
    first       the first part: every branch of start-up, one rank, one backward each
    device      a GPU, the device of tests, or the CPU; counts what a step launches
    models      a toy, a CNN of 25 million parameters, a GPT of 100 million; in three forms
    ways        how a model is wrapped: by torch, by Paceline, or not at all
    steps       one rank of a bench: training steps in interleaved rounds, and the curves of the loss
    report      the table that goes to benchmarks/results
    __main__    runs all parts and writes the report
    host        another bench of the same steps, which needs no GPU: what they take on the host

Every program takes the device as an argument. Tests run it on the CPU and on the device of tests, so that the
first run on a GPU meets no misspelt name.
"""
