"""A rank that dies, or is stopped, while a model is wrapped over Gloo is named by all others.

Neither framework is imported with this file: each rank would import the one that its server has not.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest

from paceline.errors import PacelineError
from tests.harness import run_ranks
from tests.multiprocess.meeting import meet, tell, until_told

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

    from paceline.torch import DistributedDataParallel
    from paceline.torch.link.exchange import ProcessGroupExchange

    init = f"file://{os.environ['TMPDIR']}/store" if store == "file" else "env://"
    meet("started", rank)
    dist.init_process_group(
        "gloo", init_method=init, rank=rank, world_size=3, timeout=timedelta(seconds=deadline_s)
    )
    dist.barrier()  # none is still connecting to the others
    return raised_by(
        lambda: DistributedDataParallel(torch.nn.Linear(4, 4)), ProcessGroupExchange, rank, who, sign, at
    )


def wrap_paddles(rank, who, sign, at, deadline_s=DEADLINE_S):
    """The same over Paddle's Gloo, whose store lives in rank 0 always."""
    import paddle

    from paceline.paddle import DataParallel
    from paceline.paddle.link.exchange import PaddleExchange
    from tests.multiprocess.paddle_models import join_paddle

    join_paddle(rank)
    paddle.distributed.barrier()
    return raised_by(
        lambda: DataParallel(paddle.nn.Linear(4, 4), timeout_s=deadline_s),
        PaddleExchange,
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


def deadline_of(at, *, has_store_left):
    """Long, where a survivor that learns of the death at the deadline would be wrong."""
    return PATIENT_S if at != "before" and has_store_left else DEADLINE_S


def check_killed(answers, who, at, *, has_store_left):
    """Every survivor names the rank; at once, where the store is still there to ask."""
    deadline_s = deadline_of(at, has_store_left=has_store_left)
    for rank in {0, 1, 2} - {who}:
        text, named, waited_s, pid = answers[rank]
        assert tuple(named) == (who,), text
        assert f"rank {who}" in text.lower()
        if deadline_s == PATIENT_S:
            assert f"rank {who} (pid {pid}) has died" in text, text
            assert waited_s < PATIENT_S / 2
        assert waited_s < PATIENT_S


def check_stopped(answers, who, *, has_store_left):
    for rank in {0, 1, 2} - {who}:
        text, named, _, pid = answers[rank]
        assert tuple(named) == (who,), text
        if has_store_left:
            assert f"rank {who} (pid {pid}) is stopped: `kill -CONT {pid}`" in text, text


@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize("at", ["before", 0, 2])
@pytest.mark.parametrize("who", [0, 2])
def test_a_killed_rank_is_named(who, at, store):
    has_store_left = (store, who) != ("tcp", 0)
    facts = {"who": who, "sign": signal.SIGKILL, "at": at, "store": store}
    facts["deadline_s"] = deadline_of(at, has_store_left=has_store_left)
    answers = run_ranks(wrap, 3, facts, group=None, dies={who: signal.SIGKILL})
    check_killed(answers, who, at, has_store_left=has_store_left)


@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("who", [0, 1])
def test_a_stopped_rank_is_named(who, at, store):
    facts = {"who": who, "sign": signal.SIGSTOP, "at": at, "store": store}
    answers = run_ranks(wrap, 3, facts, group=None, dies={who: signal.SIGKILL})
    check_stopped(answers, who, has_store_left=(store, who) != ("tcp", 0))


@pytest.mark.parametrize("at", ["before", 0, 2])
@pytest.mark.parametrize("who", [0, 2])
def test_a_killed_rank_is_named_over_paddles_gloo(who, at):
    facts = {"who": who, "sign": signal.SIGKILL, "at": at}
    facts["deadline_s"] = deadline_of(at, has_store_left=who != 0)
    answers = run_ranks(wrap_paddles, 3, facts, group=None, framework="paddle", dies={who: signal.SIGKILL})
    check_killed(answers, who, at, has_store_left=who != 0)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("who", [0, 1])
def test_a_stopped_rank_is_named_over_paddles_gloo(who, at):
    facts = {"who": who, "sign": signal.SIGSTOP, "at": at}
    answers = run_ranks(wrap_paddles, 3, facts, group=None, framework="paddle", dies={who: signal.SIGKILL})
    check_stopped(answers, who, has_store_left=who != 0)
