"""`trace()` of a wrapped model: the timeline of all ranks. A slow rank waits until the others wait for it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from paceline.errors import ConfigError
from paceline.tracing.ring_file import FOLDER_VARIABLE
from tests.harness import ranks
from tests.traces import passes_of, read_trace, slices_of, until_ended, waited_for


def steps_in_torch(group: object) -> tuple[object, Callable[[Callable[[], None]], None]]:
    import torch
    from torch import nn

    from paceline.torch import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    batches = iter(torch.utils.data.DataLoader(torch.randn(400, 64), batch_size=4))

    def step(before_backward: Callable[[], None]) -> None:
        loss = ddp(next(batches)).sum()
        before_backward()
        loss.backward()
        optimizer.step()

    return ddp, step


def steps_in_paddle(group: object) -> tuple[object, Callable[[Callable[[], None]], None]]:
    import numpy as np
    import paddle
    from paddle import nn

    from paceline.paddle import DataParallel

    paddle.seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1D(64), nn.Linear(64, 1))
    ddp = DataParallel(model, group=group)
    optimizer = paddle.optimizer.SGD(0.1, parameters=ddp.parameters())
    rows = list(np.random.default_rng(0).standard_normal((400, 64)).astype(np.float32))
    batches = iter(paddle.io.DataLoader(rows, batch_size=4))

    def step(before_backward: Callable[[], None]) -> None:
        loss = ddp(next(batches)).sum()
        before_backward()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()

    return ddp, step


@ranks(2)
@pytest.mark.parametrize("make", [steps_in_torch, steps_in_paddle], ids=["torch", "Paddle"])
def test_the_timeline_shows_passes_and_whom_each_rank_waited_for(group, make):
    folder = Path(os.environ["TMPDIR"])  # of all ranks
    with mock.patch.dict(os.environ, {FOLDER_VARIABLE: str(folder)}):
        ddp, step = make(group)
    for _ in range(2):
        step(lambda: None)
    path = folder / "out.json"
    with ddp.trace(path):
        for number in range(3, 7):  # pass 3: rank 1 is slow, pass 4: rank 0, ...
            is_slow = number % 2 == group.rank
            step(functools.partial(until_ended, folder, 1 - group.rank, number) if is_slow else lambda: None)
    if group.rank:
        return
    threads = read_trace(path)
    assert list(threads) == ["rank 0", "rank 1"]
    for thread in threads.values():
        for name in ("forward", "backward", "average"):
            assert passes_of(thread, name) == [3, 4, 5, 6]
        assert len(slices_of(thread, "optimizer")) == len(slices_of(thread, "data")) == 4
        posted = [each["name"] for each in thread if each["ph"] == "i"]
        assert len(posted) == 4 * len(ddp.bucket_layout())
    reduced = [each for thread in threads.values() for each in slices_of(thread, "reduce bucket")]
    assert {each["name"] for each in reduced} == {
        f"reduce bucket {n}" for n in range(len(ddp.bucket_layout()))
    }
    assert all(
        "weight" in each["args"]["gradients"] or "bias" in each["args"]["gradients"] for each in reduced
    )
    assert waited_for(threads) == {
        ("rank 0", 3, "rank 1"),
        ("rank 1", 4, "rank 0"),
        ("rank 0", 5, "rank 1"),
        ("rank 1", 6, "rank 0"),
    }


@ranks(2)
def test_a_place_that_cannot_be_written_is_told_on_every_rank(group, tmp_path):
    ddp, step = steps_in_torch(group)
    path = Path(tmp_path) / "none" / "out.json"
    with pytest.raises(ConfigError, match="The trace can't be written to"), ddp.trace(path):
        pytest.fail("nothing may run in it")
    step(lambda: None)
    assert ddp.num_good_passes == 1
