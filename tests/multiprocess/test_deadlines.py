"""Every wait ends at the user's deadline, with each backend.

The tables list the cases. In each case, all ranks prepare one call, and only one of them makes it. This file
imports neither framework. The cases run side by side, because they spend most of their time waiting.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import time
from datetime import timedelta

import pytest

from paceline.errors import DeadlineError, PacelineError
from tests.harness import run_ranks, run_side_by_side
from tests.multiprocess.rank_signals import barrier, publish, wait_until_published

ASKED_S = 4.0
BOUND_S = 40.0  # allows for a busy machine; the process groups' default timeouts are 300 s and 1800 s

OF_GROUP_S = 300.0  # the process group's timeout if the wrapper has its own

# How the ranks are connected, and where the user sets the deadline:
# "env": no process group; DDP(timeout_s=...). All others: init_process_group(..., timeout=...).
# "group": Gloo, with reduce_through="group".
# A norm within a model gets its deadline from the wrapper, with any backend.
BACKENDS = ("env", "paceline", "gloo", "group")
WAITS = {
    "wrap": BACKENDS,
    "backward": BACKENDS,
    "sync_buffers": BACKENDS,
    "finish": ("env", "paceline", "group"),
    "optimizer": ("env", "paceline"),
    "step": BACKENDS,
    "consolidate": ("env", "paceline", "group"),
    "norm": ("paceline",),
    "norm's forward": BACKENDS,
    "norm's backward": BACKENDS,
    "share": ("env", "paceline"),
    "sync_parameters": ("env", "paceline"),
    "collective": ("env",),
}
PADDLE_WAITS = {
    "wrap": ("env", "gloo"),
    "backward": ("env", "gloo"),
    "sync_buffers": ("env",),
    "finish": ("env",),
    "step": ("env", "gloo"),
    "consolidate": ("env",),
    "norm's forward": ("env", "gloo"),
    "norm's backward": ("env", "gloo"),
    "share": ("env",),
    "sync_parameters": ("env",),
}


class Torch:
    """The calls of the torch front end."""

    def __init__(self, rank, backend, asked_s):
        import torch
        import torch.distributed as dist

        import paceline.torch as front

        self.torch, self.front = torch, front
        self.options = {"reduce_through": "group"} if backend == "group" else {}
        self.limit = {}
        if backend == "env":
            self.options["timeout_s"] = self.limit["timeout_s"] = ASKED_S
            return
        importlib.import_module("paceline.torch.backend").register()
        store = dist.FileStore(f"{os.environ['TMPDIR']}/store")
        options = {"store": store, "rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
        barrier("started", rank)
        if backend == "paceline":
            dist.init_process_group(backend, timeout=timedelta(seconds=asked_s), **options)
            return
        # Connecting the ranks is not tested here, and may take longer on a busy machine.
        dist.init_process_group("gloo", timeout=timedelta(seconds=max(asked_s, BOUND_S)), **options)
        dist.barrier()
        set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # torch 2.15
        set_timeout(timedelta(seconds=asked_s))

    def network(self, norm=None):
        nn = self.torch.nn
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3) if norm is None else norm)

    def wrap(self, norm=None, **more):
        return self.front.DistributedDataParallel(self.network(norm), **{**self.options, **more})

    def backward(self, ddp):
        self.loss(ddp).backward()

    def loss(self, ddp):
        return ddp(self.torch.ones((2, 3))).square().sum()

    def optimizer(self, ddp):
        through = {key: self.options[key] for key in self.options if key == "reduce_through"}
        return self.front.ShardedOptimizer(ddp.parameters(), self.torch.optim.SGD, lr=0.1, **through)

    def consolidate(self, optimizer):
        return lambda: optimizer.consolidate_state_dict(1)

    def norm(self):
        layer = self.front.SyncBatchNorm(3)
        return lambda: layer(self.torch.ones(2, 3))

    def normalised(self):
        return self.wrap(self.front.SyncBatchNorm(3), timeout_s=ASKED_S)

    def share(self):
        module = self.torch.nn.Linear(3, 3)
        return lambda: self.front.share(module, **self.limit)


class Paddle(Torch):
    """The calls of the Paddle front end. Paddle's Gloo has no timeout, so the wrapper sets the deadline."""

    def __init__(self, rank, backend, asked_s):
        import paddle

        import paceline.paddle as front
        from tests.multiprocess.paddle_models import join_paddle

        self.torch, self.front = paddle, front
        self.options = {"timeout_s": ASKED_S}
        self.limit = {"timeout_s": ASKED_S}
        if backend == "gloo":
            join_paddle(rank)
            paddle.distributed.barrier()
            self.options["reduce_through"] = "group"

    def network(self, norm=None):
        nn = self.torch.nn
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1D(3) if norm is None else norm)

    def wrap(self, norm=None, **more):
        return self.front.DataParallel(self.network(norm), **{**self.options, **more})

    def optimizer(self, ddp):
        through = {key: self.options[key] for key in self.options if key == "reduce_through"}
        return self.front.ShardedOptimizer(
            ddp.parameters(), self.torch.optimizer.SGD, learning_rate=0.1, **through
        )


def prepared(front, wait):
    """Prepares a case on all ranks. Returns the call that only one rank makes."""
    if wait == "wrap":
        return front.wrap
    if wait == "share":
        return front.share()
    if wait == "norm":
        return front.norm()
    if wait.startswith("norm's"):
        ddp = front.normalised()
        front.backward(ddp)
        if wait == "norm's forward":
            return lambda: front.loss(ddp)
        return front.loss(ddp).backward
    if wait == "collective":
        import numpy as np

        import paceline

        group = paceline.init(timeout_s=ASKED_S)
        return lambda: group.all_reduce(np.ones(3, np.float32))
    if wait == "sync_parameters":
        every_third = front.front.LocalSGD(3, between="ranks")
        ddp = front.wrap(local_sgd=every_third)
        front.backward(ddp)
        return ddp.sync_parameters
    ddp = front.wrap()
    front.backward(ddp)
    if wait == "backward":
        return lambda: front.backward(ddp)
    if wait in ("sync_buffers", "finish"):
        return getattr(ddp, wait)
    if wait == "optimizer":
        return lambda: front.optimizer(ddp)
    optimizer = front.optimizer(ddp)
    return optimizer.step if wait == "step" else front.consolidate(optimizer)


def waits(rank, framework, backend, wait):
    """Runs a case. Returns rank 0's error, if any, and its waiting time in seconds; rank 1 does not call."""
    of_group_s = OF_GROUP_S if wait.startswith("norm's") else ASKED_S
    front = {"torch": Torch, "paddle": Paddle}[framework](rank, backend, of_group_s)
    call = prepared(front, wait)
    barrier("prepared", rank)
    if rank == 1:
        wait_until_published("raised", [0])
        return None
    begun = time.monotonic()
    raised = None
    try:
        call()
    except PacelineError as error:
        raised = type(error).__name__, getattr(error, "late", None), str(error)
    finally:
        waited_s = time.monotonic() - begun
        publish("raised", rank)
    with contextlib.suppress(Exception):  # the other rank is about to exit
        del call, front
    return raised, waited_s


CASES = [
    (framework, backend, wait)
    for framework, table in (("torch", WAITS), ("paddle", PADDLE_WAITS))
    if framework == "torch" or importlib.util.find_spec("paddle")
    for wait, backends in table.items()
    for backend in backends
]


@pytest.fixture(scope="module")
def results_of(request):
    """Returns a function that waits for rank 0's result of a case. All selected cases start at once."""
    items = [item for item in request.session.items if item.path == request.path]
    runs = {}
    for case in (item.callspec.params["case"] for item in items):
        facts = dict(zip(("framework", "backend", "wait"), case))
        runs[case] = functools.partial(run_ranks, waits, 2, facts, group=None, framework=case[0])
    with run_side_by_side(runs) as results:
        yield lambda case: results[case].result()[0]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_wait_ends_at_the_deadline_that_the_user_gave(results_of, case):
    raised, waited_s = results_of(case)
    assert raised is not None, f"returned after {waited_s:.1f} s, although the other rank did not call"
    kind, late, text = raised
    assert waited_s < BOUND_S, text
    assert waited_s >= ASKED_S - 0.1, text
    assert kind == DeadlineError.__name__ or "RendezvousError" in kind, text
    assert late in ((1,), None), text
