"""Starts ranks: `paceline run`, `paceline.spawn`, and the supervision of their processes.

May import paceline.errors, arguments, env, stacks and replace_class, and those modules of rendezvous that
need no core; never numpy, torch or the core, so that the launcher itself is small and starts at once.

    cli.py             the arguments of `paceline run`
    elastic.py         several hosts: becomes torch's elastic agent, in a process of its own
    spawn.py           `paceline.spawn`; spawned.py is the rank's side of it, pickled_call.py what it calls
    plan.py            what is to be started: one frozen value that all modules below take
    variables.py       the environment of each rank (pure)
    job_secret.py      a secret that the ranks inherit in memory
    placement.py       threads and cores of each rank (pure); topology.py reads them from the machine
    tune_answers.py    the answers of `paceline tune`, which `paceline run -n auto` uses
    ports.py           free ports, and which process holds a taken one
    guardian.py        the process that the user sees: leaves nothing behind, whichever process dies
    supervise.py       its child: starts the ranks, relays their output, stops them
    last_ranks.py      ranks that go on after the others have ended
    rank_process.py    starts the process of a rank; forked.py and fork_template.py fork all ranks from one
    process_tree.py    finds and ends all processes below this one
    output_pipes.py    reads what ranks write, and their log files
    output.py          lines and progress bars of several ranks on one terminal
    failure_report.py  which rank failed first, and why (pure)

Not public.
"""
