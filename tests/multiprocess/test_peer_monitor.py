"""Ranks of one host whose gradients go over a process group: errors still name the lost or late rank."""

from __future__ import annotations

import importlib
import logging
import os
import resource
import signal
import sys

import pytest

from paceline.errors import DeadlineError, PeerLostError, RegionError
from paceline.health import control_channel
from tests.harness import ranks
from tests.multiprocess.conformance_numpy import batch
from tests.multiprocess.rank_signals import barrier, publish, wait_until_published
from tests.several_hosts import be_on_host

PATIENT_S = 60.0
ASKED_S = 4.0  # also bounds the backwards before the one that a rank skips

both = pytest.mark.parametrize("framework", ["torch", "paddle"])


def model_of(rank: int, framework: str, timeout_s: float = PATIENT_S):
    """Return a function that makes a backward over Gloo; the model has made one already."""
    if framework == "torch":
        import torch

        import paceline.torch

        store = torch.distributed.FileStore(f"{os.environ['TMPDIR']}/store", int(os.environ["WORLD_SIZE"]))
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"])
        )
        wrap = paceline.torch.DistributedDataParallel
    else:
        from paceline.paddle import DataParallel as wrap
        from tests.multiprocess.paddle_models import join_paddle

        join_paddle(rank)
    do = importlib.import_module(f"tests.multiprocess.conformance_{framework}")
    model = wrap(do.network(), reduce_through="group", timeout_s=timeout_s)
    assert model.gradient_path == "group"

    def one_backward() -> None:
        do.backward(do.loss(model, batch()))

    one_backward()
    # The first backward ends in extra calls, in which other ranks may be when this rank has finished.
    barrier("through", rank)
    return one_backward


@both
@ranks(3, group=None, framework="framework", dies={1: signal.SIGKILL})
def test_a_rank_that_is_killed(rank, framework):
    one_backward = model_of(rank, framework)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="Rank 1 of 3 died") as caught:
        one_backward()
    assert caught.value.lost == (1,)
    assert "fc" in caught.value.where or "weight" in caught.value.where or "status" in caught.value.where


@both
@ranks(3, group=None, framework="framework", dies={1: ValueError})
def test_a_rank_that_raises(rank, framework):
    one_backward = model_of(rank, framework)
    if rank == 1:
        error = ValueError("the cause")
        sys.excepthook(ValueError, error, None)  # as the interpreter would; the harness catches the exception
        raise error
    with pytest.raises(PeerLostError) as caught:
        one_backward()
    assert caught.value.lost == (1,)
    assert "the cause" in str(caught.value)


@both
@ranks(3, group=None, framework="framework", dies={1: SystemExit})
def test_a_rank_that_exits(rank, framework):
    one_backward = model_of(rank, framework)
    if rank == 1:
        raise SystemExit(0)
    with pytest.raises(PeerLostError) as caught:
        one_backward()
    assert "ank 1 of 3" in str(caught.value)


@both
@ranks(3, group=None, framework="framework", dies={1: signal.SIGKILL})
def test_a_rank_that_skips_a_backward(rank, framework):
    one_backward = model_of(rank, framework, ASKED_S)
    if rank == 1:
        wait_until_published("raised", (0, 2))
        os.kill(os.getpid(), signal.SIGKILL)  # otherwise Paddle's threads would wait 30 s more
    with pytest.raises(DeadlineError) as caught:
        one_backward()
    publish("raised", rank)
    assert caught.value.late == (1,)
    assert "is alive; last after backward of iteration" in str(caught.value)


@ranks(2, group="gloo", dies={1: signal.SIGKILL})
def test_with_a_communication_hook(rank):
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from paceline.torch import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    model.register_comm_hook(None, allreduce_hook)
    model(torch.ones(1, 3)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        model(torch.ones(1, 3)).sum().backward()
    assert caught.value.lost == (1,)


@both
@ranks(2, group=None, framework="framework", dies={1: signal.SIGKILL})
def test_on_two_hosts_the_control_channel_detects_it(rank, framework):
    be_on_host(rank)
    one_backward = model_of(rank, framework)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        one_backward()
    assert caught.value.lost == (1,)


@both
@ranks(2, group=None, framework="framework")
def test_without_memory_rank_0_warns_that_errors_cannot_name_ranks(rank, framework):
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append
    logging.getLogger("paceline").addHandler(handler)
    if rank == 0:  # rank 0 creates the memory
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    model_of(rank, framework)()
    texts = [record.getMessage() for record in logged if "is lost or late" in record.getMessage()]
    assert len(texts) == (rank == 0)
    assert all("Rank 0 could not take the shared memory" in text and "ulimit -f" in text for text in texts)


@both
@ranks(2, group=None, framework="framework", dies={1: RegionError})
def test_a_rank_that_cannot_start_the_control_channel_is_reported(rank, framework, monkeypatch):
    be_on_host(rank)

    def refuse(thread):
        raise RegionError("The thread could not be started.")

    if rank == 1:
        monkeypatch.setattr(control_channel, "start_thread", refuse)
        model_of(rank, framework)
    with pytest.raises(PeerLostError, match=r"(?s)RegionError.*The thread could not be started"):
        model_of(rank, framework)
