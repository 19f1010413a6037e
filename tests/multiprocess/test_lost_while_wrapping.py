"""If a rank dies or is stopped while a model is wrapped over Gloo, all others name it.

This file imports neither framework, because each rank would then import the one that its server does not
have. The cases run side by side, because they mostly wait for deadlines.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest

from paceline.errors import PacelineError
from tests.harness import run_ranks, run_side_by_side
from tests.multiprocess.rank_signals import barrier, publish, wait_until_published

FORMING_S = 300  # until all ranks have joined the group
PATIENT_S = 40  # where the death is found at once, and no rank waits for this deadline
DEADLINE_S = 4


def strike(sign):
    """End or stop this rank; the others may read its pid."""
    with open(f"{os.environ['TMPDIR']}/struck.partial", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, f"{os.environ['TMPDIR']}/struck")
    os.kill(os.getpid(), sign)
    time.sleep(60)


def strike_at(number, sign, exchange):
    """Strike before this rank's exchange of that number; 0 is the first."""
    count = [0]

    def all_gather(self, payload, timeout_s, original=exchange.all_gather):
        if count[0] == number:
            strike(sign)
        count[0] += 1
        return original(self, payload, timeout_s)

    exchange.all_gather = all_gather


def wrap(rank, struck, sign, at, store, deadline_s=DEADLINE_S):
    """Return what wrapping raises as text, the ranks that the error names, the seconds it took, and a pid."""
    import torch
    import torch.distributed as dist

    from paceline.reducer.process_group_peers import ProcessGroupExchange
    from paceline.torch import DistributedDataParallel

    init = f"file://{os.environ['TMPDIR']}/store" if store == "file" else "env://"
    barrier("started", rank)
    forming = timedelta(seconds=FORMING_S)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=3, timeout=forming)
    dist.barrier()  # no rank is still connecting to the others
    deadline = timedelta(seconds=deadline_s)  # as if the group had been made with it
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # torch 2.15
    set_timeout(deadline)
    dist.distributed_c10d._get_default_store().set_timeout(deadline)
    return raised_by(
        lambda: DistributedDataParallel(torch.nn.Linear(4, 4)), ProcessGroupExchange, rank, struck, sign, at
    )


def wrap_paddles(rank, struck, sign, at, deadline_s=DEADLINE_S):
    """The same over Paddle's Gloo, whose store is always in rank 0."""
    import paddle

    from paceline.paddle import DataParallel
    from paceline.reducer.process_group_peers import ProcessGroupExchange
    from tests.multiprocess.paddle_models import join_paddle

    join_paddle(rank)
    paddle.distributed.barrier()
    return raised_by(
        lambda: DataParallel(paddle.nn.Linear(4, 4), timeout_s=deadline_s),
        ProcessGroupExchange,
        rank,
        struck,
        sign,
        at,
    )


def raised_by(wrap_model, exchange, rank, struck, sign, at):
    """Wrap a model, while the rank `struck` gets a signal before its exchange `at`, or before all."""
    if rank == struck:
        if at == "before":
            strike(sign)
        strike_at(at, sign, exchange)
    started = time.monotonic()
    try:
        wrap_model()
    except PacelineError as error:
        with open(f"{os.environ['TMPDIR']}/struck") as file:
            pid = int(file.read())
        waited_s = time.monotonic() - started
        publish("raised", rank)
        wait_until_published("raised", {0, 1, 2} - {struck})  # a store ends with the rank that serves it
        if sign == signal.SIGSTOP and rank == (struck + 1) % 3:
            os.kill(pid, signal.SIGKILL)
        return str(error), getattr(error, "missing", None) or getattr(error, "lost", None), waited_s, pid
    return None


@dataclass(frozen=True)
class Case:
    """What happens to the rank `struck`, and what the others' errors must say."""

    sign: signal.Signals
    struck: int
    at: int | str
    store: str  # the store of torch's ranks; "paddle" is Paddle's Gloo, whose store is in rank 0

    def __str__(self) -> str:
        return f"{self.struck}-{self.at}-{self.store}"

    @property
    def has_store_left(self) -> bool:
        return self.struck != 0 or self.store == "file"

    @property
    def deadline_s(self) -> int:
        """Long if survivors must learn of the death before the deadline."""
        is_known_at_once = self.sign == signal.SIGKILL and self.at != "before" and self.has_store_left
        return PATIENT_S if is_known_at_once else DEADLINE_S

    def run(self):
        """Return a function that runs this case; the ranks return what `raised_by` does."""
        facts = {"struck": self.struck, "sign": self.sign, "at": self.at, "deadline_s": self.deadline_s}
        options = {"group": None, "dies": {self.struck: signal.SIGKILL}}
        if self.store == "paddle":
            return functools.partial(run_ranks, wrap_paddles, 3, facts, framework="paddle", **options)
        return functools.partial(run_ranks, wrap, 3, {**facts, "store": self.store}, **options)


STORES = ("file", "tcp", *(("paddle",) if importlib.util.find_spec("paddle") else ()))
KILLED = [
    Case(signal.SIGKILL, struck, at, store)
    for store in STORES
    for struck in (0, 2)
    for at in ("before", 0, 2)
]
STOPPED = [Case(signal.SIGSTOP, struck, at, store) for store in STORES for struck in (0, 1) for at in (0, 2)]


@pytest.fixture(scope="module")
def outcomes(request):
    """Return a function from a case to what its ranks returned. All selected cases begin at once."""
    cases = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    with run_side_by_side({case: case.run() for case in cases}) as results:
        yield lambda case: results[case].result()


@pytest.mark.parametrize("case", KILLED, ids=str)
def test_a_killed_rank_is_named(outcomes, case):
    """Every survivor names the rank; at once, if the store still runs."""
    outcome = outcomes(case)
    for rank in {0, 1, 2} - {case.struck}:
        text, named, waited_s, pid = outcome[rank]
        assert tuple(named) == (case.struck,), text
        assert f"rank {case.struck}" in text.lower()
        if case.deadline_s == PATIENT_S:
            assert f"rank {case.struck} (pid {pid}) has died" in text, text
            assert waited_s < PATIENT_S / 2
        assert waited_s < PATIENT_S


@pytest.mark.parametrize("case", STOPPED, ids=str)
def test_a_stopped_rank_is_named(outcomes, case):
    outcome = outcomes(case)
    for rank in {0, 1, 2} - {case.struck}:
        text, named, _, pid = outcome[rank]
        assert tuple(named) == (case.struck,), text
        if case.has_store_left:
            assert f"rank {case.struck} (pid {pid}) is stopped: `kill -CONT {pid}`" in text, text
