"""Every wait ends at the deadline that the user gave, whichever backend connects the ranks.

A table: each run brings the ranks to one wait, and one rank alone goes into it. Neither framework is imported
with this file. The runs are side by side, because they wait for deadlines most of their time.
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
from tests.multiprocess.rank_signals import meet, tell, until_told

ASKED_S = 4.0
BOUND_S = 40.0  # of a busy machine; the groups' own time-outs are 300 s and 1800 s

OF_GROUP_S = 300.0  # where the wrapper was given another one

# How the ranks are connected, and where the user has given the deadline:
# "env": no process group; DDP(timeout_s=...). The others: init_process_group(..., timeout=...).
# "group": Gloo, and everything goes through it.
# A norm within a model is given the deadline by the wrapper, with any backend.
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
    """The waits of torch's front end."""

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
        meet("started", rank)
        if backend == "paceline":
            dist.init_process_group(backend, timeout=timedelta(seconds=asked_s), **options)
            return
        # To connect the ranks may take longer on a busy machine; that is not what is tested.
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
    """The same of Paddle's, whose Gloo knows no deadline: the wrapper is given it."""

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
    """What one rank alone is to call, with all that comes before done by all ranks."""
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
    """What the wait of rank 0 raises and after how long; rank 1 does not come."""
    of_group_s = OF_GROUP_S if wait.startswith("norm's") else ASKED_S
    front = {"torch": Torch, "paddle": Paddle}[framework](rank, backend, of_group_s)
    call = prepared(front, wait)
    meet("prepared", rank)
    if rank == 1:
        until_told("raised", [0])
        return None
    begun = time.monotonic()
    said = None
    try:
        call()
    except PacelineError as error:
        said = type(error).__name__, getattr(error, "late", None), str(error)
    finally:
        waited_s = time.monotonic() - begun
        tell("raised", rank)
    with contextlib.suppress(Exception):  # the other rank is about to leave
        del call, front
    return said, waited_s


CASES = [
    (framework, backend, wait)
    for framework, table in (("torch", WAITS), ("paddle", PADDLE_WAITS))
    if framework == "torch" or importlib.util.find_spec("paddle")
    for wait, backends in table.items()
    for backend in backends
]


@pytest.fixture(scope="module")
def answers(request):
    """What rank 0 of a case answered. All cases that were selected begin at once."""
    items = [item for item in request.session.items if item.path == request.path]
    runs = {}
    for case in (item.callspec.params["case"] for item in items):
        facts = dict(zip(("framework", "backend", "wait"), case))
        runs[case] = functools.partial(run_ranks, waits, 2, facts, group=None, framework=case[0])
    with run_side_by_side(runs) as results:
        yield lambda case: results[case].result()[0]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_wait_ends_at_the_deadline_that_the_user_gave(answers, case):
    said, waited_s = answers(case)
    assert said is not None, f"returned after {waited_s:.1f} s, though the other rank did not come"
    kind, late, text = said
    assert waited_s < BOUND_S, text
    assert waited_s >= ASKED_S - 0.1, text
    assert kind == DeadlineError.__name__ or "RendezvousError" in kind, text
    assert late in ((1,), None), text
