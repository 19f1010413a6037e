"""Starts ranks: `paceline run`, `paceline.spawn`, and the supervision of their processes.

May import paceline.errors, arguments, env, stacks and replacing, and those modules of rendezvous that need no
core; never numpy, torch or the core, so that the launcher itself is small and starts at once.

    cli.py             the arguments of `paceline run`
    elastic.py         several hosts: becomes torch's elastic agent, in a process of its own
    spawn.py           `paceline.spawn`; spawned.py is the rank's side of it
    plan.py            what is to be started: one frozen value that all modules below take
    variables.py       the environment of each rank (pure)
    job_secret.py      a secret that the ranks inherit in memory
    placement.py       threads and cores of each rank (pure); topology.py reads them from the machine
    tune_answers.py    the answers of `paceline tune`, which `paceline run -n auto` uses
    ports.py           free ports, and which process holds a taken one
    guardian.py        the process that the user sees: leaves nothing behind, whichever process dies
    supervise.py       its child: starts the ranks, relays their output, stops them
    last_ranks.py      ranks that go on after the others have ended
    process.py         one rank's process, and everything it started
    output.py          lines and progress bars of several ranks on one terminal
    failure_report.py  which rank failed first, and why (pure)

Not public.
"""
