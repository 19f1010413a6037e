"""torch's own tests of its DDP and of its collectives, with Paceline in place of torch's class and of Gloo.

torch ships these tests in its wheel (`torch.testing._internal.distributed.distributed_test`); this folder has
none of their code. It has replacements for things that they need and this machine lacks (`stand_ins.py`), the
runner of one of them on two ranks (`run.py`), and the expected result of each, with the reason if one stops
(`outcomes.json`, read by `outcomes.py`). `make incumbents` runs all of them; `test_incumbents.py` a small
part.
"""
