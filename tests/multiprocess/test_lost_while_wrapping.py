"""A rank that dies, or is stopped, while a model is wrapped over Gloo is named by all others.

Neither framework is imported with this file: each rank would import the one that its server has not. The
cases run side by side, because they wait for deadlines most of their time.
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
from tests.multiprocess.rank_signals import meet, tell, until_told

FORMING_S = 300  # until all ranks have met
PATIENT_S = 40  # where the death is known at once, and nobody waits for it
DEADLINE_S = 4


def strike(sign):
    """This rank's end; the others may ask who it was."""
    with open(f"{os.environ['TMPDIR']}/struck.partial", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, f"{os.environ['TMPDIR']}/struck")
    os.kill(os.getpid(), sign)
    time.sleep(60)


def strike_at(number, sign, exchange):
    """Before this rank's exchange of that number; 0 is the first."""
    count = [0]

    def all_gather(self, payload, timeout_s, original=exchange.all_gather):
        if count[0] == number:
            strike(sign)
        count[0] += 1
        return original(self, payload, timeout_s)

    exchange.all_gather = all_gather


def wrap(rank, who, sign, at, store, deadline_s=DEADLINE_S):
    """What wrapping raises, as text, with the ranks that the error names, and after how long."""
    import torch
    import torch.distributed as dist

    from paceline.reducer.process_group_peers import ProcessGroupExchange
    from paceline.torch import DistributedDataParallel

    init = f"file://{os.environ['TMPDIR']}/store" if store == "file" else "env://"
    meet("started", rank)
    forming = timedelta(seconds=FORMING_S)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=3, timeout=forming)
    dist.barrier()  # none is still connecting to the others
    deadline = timedelta(seconds=deadline_s)  # as if it had been the group's from the start
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # torch 2.15
    set_timeout(deadline)
    dist.distributed_c10d._get_default_store().set_timeout(deadline)
    return raised_by(
        lambda: DistributedDataParallel(torch.nn.Linear(4, 4)), ProcessGroupExchange, rank, who, sign, at
    )


def wrap_paddles(rank, who, sign, at, deadline_s=DEADLINE_S):
    """The same over Paddle's Gloo, whose store lives in rank 0 always."""
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
        who,
        sign,
        at,
    )


def raised_by(wrap_model, exchange, rank, who, sign, at):
    """Wrap a model, while the rank `who` gets a signal before its exchange `at`, or before all."""
    if rank == who:
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
        tell("raised", rank)
        until_told("raised", {0, 1, 2} - {who})  # a store ends with the rank that serves it
        if sign == signal.SIGSTOP and rank == (who + 1) % 3:
            os.kill(pid, signal.SIGKILL)
        return str(error), getattr(error, "missing", None) or getattr(error, "lost", None), waited_s, pid
    return None


@dataclass(frozen=True)
class Case:
    """What happens to the rank `who`, and what the others' errors must say."""

    sign: signal.Signals
    who: int
    at: int | str
    store: str  # where torch's ranks meet; "paddle": those of Paddle's Gloo, which meet in rank 0

    def __str__(self) -> str:
        return f"{self.who}-{self.at}-{self.store}"

    @property
    def has_store_left(self) -> bool:
        return self.who != 0 or self.store == "file"

    @property
    def deadline_s(self) -> int:
        """Long, where a survivor that learns of the death at the deadline would be wrong."""
        is_known_at_once = self.sign == signal.SIGKILL and self.at != "before" and self.has_store_left
        return PATIENT_S if is_known_at_once else DEADLINE_S

    def run(self):
        """The run of this case, which is to be called; the ranks return what `raised_by` does."""
        facts = {"who": self.who, "sign": self.sign, "at": self.at, "deadline_s": self.deadline_s}
        options = {"group": None, "dies": {self.who: signal.SIGKILL}}
        if self.store == "paddle":
            return functools.partial(run_ranks, wrap_paddles, 3, facts, framework="paddle", **options)
        return functools.partial(run_ranks, wrap, 3, {**facts, "store": self.store}, **options)


STORES = ("file", "tcp", *(("paddle",) if importlib.util.find_spec("paddle") else ()))
KILLED = [
    Case(signal.SIGKILL, who, at, store) for store in STORES for who in (0, 2) for at in ("before", 0, 2)
]
STOPPED = [Case(signal.SIGSTOP, who, at, store) for store in STORES for who in (0, 1) for at in (0, 2)]


@pytest.fixture(scope="module")
def answers(request):
    """What the ranks of a case answered. All cases that were selected begin at once."""
    cases = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    with run_side_by_side({case: case.run() for case in cases}) as results:
        yield lambda case: results[case].result()


@pytest.mark.parametrize("case", KILLED, ids=str)
def test_a_killed_rank_is_named(answers, case):
    """Every survivor names the rank; at once, where the store is still there to ask."""
    said = answers(case)
    for rank in {0, 1, 2} - {case.who}:
        text, named, waited_s, pid = said[rank]
        assert tuple(named) == (case.who,), text
        assert f"rank {case.who}" in text.lower()
        if case.deadline_s == PATIENT_S:
            assert f"rank {case.who} (pid {pid}) has died" in text, text
            assert waited_s < PATIENT_S / 2
        assert waited_s < PATIENT_S


@pytest.mark.parametrize("case", STOPPED, ids=str)
def test_a_stopped_rank_is_named(answers, case):
    said = answers(case)
    for rank in {0, 1, 2} - {case.who}:
        text, named, _, pid = said[rank]
        assert tuple(named) == (case.who,), text
        if case.has_store_left:
            assert f"rank {case.who} (pid {pid}) is stopped: `kill -CONT {pid}`" in text, text
