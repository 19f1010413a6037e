"""The programs for machines with a GPU: `make gpu-check`, or `python -m tests.gpu`.

machine     the reason why a GPU cannot be tested here, in one sentence; the GPU's description
parts       the parts of a check, each of one or several processes, with its own deadline
first       the first part: every branch of start-up, one rank, one backward each
device      a GPU, the test device, or the CPU; counts the launches of a step
models      a toy, a CNN of 25 million parameters, a GPT of 100 million; in three forms
ways        the wrappers of a model: torch's, Paceline's, or none
steps       one rank of a bench: training steps in interleaved rounds, and the curves of the loss
report      the table that goes to benchmarks/results
__main__    runs all parts and writes the report
host        another bench of the same steps, which needs no GPU: their time on the host

Every program takes the device as an argument. Tests run it on the CPU and on the test device, so that the
first run on a GPU finds no misspelt name.
"""
