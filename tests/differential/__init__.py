"""The differential fuzzer: generated training programs, under Paceline and under references.

A program is plain data. Every rank of a pool runs it under Paceline, and one process simulates all ranks
without any library that averages. The two must agree: the same means, the same bits on all ranks, or an error
on all ranks. docs/design/testing.md explains how to use it and how to read a report.

Every framework has (Paddle's files have the same names as torch's):

torch_grammar.py     from a seed to a program
torch_models.py      from a model's data to a module
torch_machine.py     runs a program; independent of the wrapper that averages
torch_subjects.py    the wrappers: Paceline in each mode, or torch's own DDP
torch_reference.py   one process that simulates all ranks, in float64
torch_refusals.py    the errors that Paceline may raise by its documentation
torch_differences.py the known differences of torch's own DDP from the reference
torch_corpus.py      small programs that have found a bug
torch_mutations.py   injected bugs, to test the fuzzer itself
torch_frontend.py    exports the files above to the files below

and these are independent of the framework:

between.py           operations between a forward and its backward, or between two steps
programs.py          how programs are walked, numbered and shown
records.py           the record that a rank returns of its run
judge.py             decides whether the records agree
differences.py       the effects of the order of forwards and backwards on a framework's own wrapper
pool.py              forked ranks that run one program after the other
shrink.py            the smallest program that still fails
walk.py              how one rank walks through a program, and where ranks synchronise
lockstep.py          one process that simulates all ranks
command.py           runs the fuzzer for the tests
session.py           one program in its modes, with its references
jobs.py              many programs, side by side
report.py            the table of many programs
__main__.py          the command line

Each of these is a separate generator with its own reference, for features that the programs above cannot
have:

local_sgd.py         replicas that train independently between syncs
kept_errors.py       compressed gradients, of which only the sum over many backwards is right
exchanges.py         norms and losses that exchange gradients between ranks
handlers.py          signal handlers that raise in the middle of a call
virtual_ranks.py     virtual ranks on random numbers of processes, with stops
whole_steps.py       steps of Paddle under to_static, with gradients of gradients
driver.py            their command line
"""
