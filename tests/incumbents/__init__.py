"""torch's own tests of its DDP and of its collectives, with Paceline in place of torch's class and of Gloo.

torch ships these tests in its wheel (`torch.testing._internal.distributed.distributed_test`); no line of them
is here. What is here: what they need that this machine has not (`stand_ins.py`), how one of them runs on two
ranks (`run.py`), and what is expected of each, with the reason where one stops (`outcomes.json`, read by
`outcomes.py`). `make incumbents` runs all of them; `test_incumbents.py` a small part.
"""
