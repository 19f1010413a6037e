"""The chaos driver: random faults in real training jobs, and a judge that knows what must come of each.

A *plan* is a job (framework, ranks, over what gradients go, style of training) and one fault in it, made from
a seed. Its ranks are forks of a process that has imported the framework; or real processes under a launcher.
docs/design/testing.md tells how to use it and how to read a report.

    plans.py        from a seed to a plan
    strikes.py      what a fault does inside of the rank that it strikes
    board.py        memory in which ranks report how far they are and how they ended, whatever kills them
    rank.py         one rank's program; knows no framework
    torch_rank.py   the model, and who averages: Paceline in each of its ways, or torch's own DDP
    paddle_rank.py  the same for Paddle
    reference.py    the weights after each step, in numpy, in float64, in one process
    trial.py        starts the ranks of a plan, strikes from outside, waits, looks what is left behind
    launched.py     trials under paceline run, spawn and torchrun
    judge.py        what must hold of how the ranks ended
    report.py       the table of many trials
    journal.py      its rows in a file, so that a run that was interrupted goes on
    __main__.py     the command line
"""
