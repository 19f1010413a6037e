"""The chaos driver: random faults in real training jobs, and a judge of their results.

A *plan* is a job (framework, ranks, transport of the gradients, style of training) and one fault in it, made
from a seed. Its ranks are forks of a process that has imported the framework, or real processes under a
launcher. docs/design/testing.md explains how to use it and how to read a report.

plans.py        from a seed to a plan
strikes.py      the faults that a struck rank causes in itself
board.py        memory in which ranks report their progress and their end, however they die
rank.py         one rank's program; independent of the framework
torch_rank.py   the model, and its wrapper: Paceline in each of its variants, or torch's own DDP
paddle_rank.py  the same for Paddle
reference.py    the weights after each step, in numpy, in float64, in one process
trial.py        starts the ranks of a plan, strikes from outside, waits, looks for leftovers
launched.py     trials under paceline run, spawn and torchrun
judge.py        the rules for the ends of the ranks
report.py       the table of many trials
journal.py      its rows in a file, so that an interrupted run can be resumed
__main__.py     the command line
"""
