"""`paceline tune`: with how many ranks and threads a user's own script is fastest on this machine.

Each layout (ranks x threads) is a job of `paceline run`. All of them are started once, and then take turns:
the processes of the others are stopped meanwhile, by SIGSTOP. So one start pays for many measurements, and
whatever else the machine does hits all layouts alike. What counts is what wrapped models are given to train
on, which ranks record under `paceline tune` (`tracing`).

    cli.py       the arguments, and what is said at the end
    layouts.py   which layouts there are (pure)
    rates.py     from the recordings of one turn to samples per second (pure)
    compare.py   which layout is measured next, when to stop, which is fastest and how sure that is (pure)
    job.py       one layout as a job: started, stopped for a while, ended
    measure.py   the loop that does what compare.py decides
    answer.py    the sentences, the table, and the picture

Not public.
"""
