"""The differential fuzzer: generated training programs, under Paceline and under references.

A program is plain data. Every rank of a pool runs it under Paceline, one process simulates all ranks without
any library that averages, and the two must agree: the same means, the same bits on all ranks, or an error on
all ranks. docs/design/testing.md tells how to use it and how to read a report.

Every framework has (as torch, so Paddle):

    torch_grammar.py     from a seed to a program
    torch_models.py      from a model's data to a module
    torch_machine.py     runs a program; knows nothing of who averages
    torch_subjects.py    who averages: Paceline in each mode, or torch's own DDP
    torch_reference.py   one process that simulates all ranks, in float64
    torch_refusals.py    what Paceline may refuse
    torch_differences.py where torch's own DDP is known to differ from the reference
    torch_corpus.py      small programs that have found a bug
    torch_mutations.py   bugs that are put in, to test the fuzzer itself
    torch_frontend.py    names the parts of above for the files below

and these know no framework:

    between.py           what programs do between a forward and its backward, or between two steps
    programs.py          how programs are walked, numbered and shown
    records.py           what a rank reports of its run
    judge.py             whether the records agree
    differences.py       what the order of forwards and backwards means for a framework's own wrapper
    pool.py              forked ranks that run one program after the other
    shrink.py            the smallest program that still fails
    walk.py              how one rank walks through a program, and where ranks meet
    lockstep.py          one process that simulates all ranks
    command.py           the fuzzer as the tests run it
    session.py           one program in its modes, with its references
    jobs.py              many programs, side by side
    report.py            the table of many
    __main__.py          the command line

Each of these is a generator of its own, with its own reference, for what the programs above cannot have:

    local_sgd.py         replicas that go their own ways
    kept_errors.py       compressed gradients, of which only the sum over many backwards is right
    exchanges.py         norms and losses that exchange gradients between ranks
    handlers.py          signal handlers that raise in the middle of a call
    virtual_ranks.py     virtual ranks on numbers of processes that are drawn, with stops
    whole_steps.py       steps of Paddle under to_static, with gradients of gradients
    driver.py            their command line
"""
