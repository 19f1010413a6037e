"""`paceline tune`: finds the numbers of ranks and threads with which a script is fastest on this machine.

Each layout (ranks x threads) is a job of `paceline run`. All jobs are started once, and then take turns:
while one runs, the processes of the others are stopped by SIGSTOP. So one start serves many measurements, and
other load on the machine affects all layouts alike. The rate of a layout is the number of samples per second
that its wrapped models are given to train on. Ranks record these batches under `paceline tune`
(`trace/recording.py`).

    cli.py          the arguments, and the report at the end
    layouts.py      the layouts to try (pure)
    rates.py        from the recordings of one turn to samples per second (pure)
    compare.py      which layout is measured next, when to stop, which is fastest and how certain (pure)
    job.py          one layout as a job that is started, stopped for a while, and ended
    measure.py      the loop that carries out what compare.py decides
    answer_text.py  the sentences, the table, and the picture

Not public.
"""
