"""`trace()` of a wrapped model: all ranks' timeline. A slow rank pauses until the others wait for it."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import paceline
from paceline.errors import ConfigError
from paceline.monitor.watch import JobWatch
from paceline.trace import ring_file
from paceline.trace.records import Event
from paceline.trace.ring_file import BATCHES_VARIABLE, FOLDER_VARIABLE
from tests.harness import ranks
from tests.traces import backwards_of, read_trace, slices_of, until_ended, waited_for


def steps_in_torch(group: object) -> tuple[object, Callable[[Callable[[], None]], None]]:
    import torch
    from torch import nn

    from paceline.torch import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    batches = iter(torch.utils.data.DataLoader(torch.randn(400, 64), batch_size=4))

    def step(before_backward: Callable[[], None], is_local: bool = False) -> None:
        loss = ddp(next(batches)).sum()
        before_backward()
        loss.backward()
        if is_local:
            return
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

    def step(before_backward: Callable[[], None], is_local: bool = False) -> None:
        loss = ddp(next(batches)).sum()
        before_backward()
        loss.backward()
        if is_local:
            return
        optimizer.step()
        optimizer.clear_grad()

    return ddp, step


STEPS = {"torch": steps_in_torch, "paddle": steps_in_paddle}
both = pytest.mark.parametrize("framework", STEPS)


@ranks(2, framework="framework")
@both
def test_the_timeline_shows_backwards_and_the_ranks_that_each_rank_waited_for(group, framework):
    folder = Path(os.environ["TMPDIR"])  # shared by all ranks
    with mock.patch.dict(os.environ, {FOLDER_VARIABLE: str(folder)}):
        ddp, step = STEPS[framework](group)
    for _ in range(2):
        step(lambda: None)
    path = folder / "out.json"
    with ddp.trace(path):
        for number in range(3, 7):  # iteration 3: rank 1 is slow, iteration 4: rank 0, ...
            is_slow = number % 2 == group.rank
            step(functools.partial(until_ended, folder, 1 - group.rank, number) if is_slow else lambda: None)
        with ddp.no_sync():
            step(lambda: None, is_local=True)
    if group.rank:
        return
    threads = read_trace(path)
    assert list(threads) == ["rank 0", "rank 1"]
    for thread in threads.values():
        assert backwards_of(thread, "forward") == backwards_of(thread, "backward") == [3, 4, 5, 6, 7]
        for name in ("forward", "backward"):
            assert [each["args"].get("no_sync", False) for each in slices_of(thread, name)] == [False] * 4 + [
                True
            ]
        assert backwards_of(thread, "average") == [3, 4, 5, 6]
        assert (len(slices_of(thread, "optimizer")), len(slices_of(thread, "data"))) == (4, 5)
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


def batches_recorded(folder, rank, framework, group):
    """Return what `paceline tune` reads about three steps on 4 samples of 64 features, and an evaluation."""
    with mock.patch.dict(os.environ, {FOLDER_VARIABLE: str(folder), BATCHES_VARIABLE: "1"}):
        ddp, step = STEPS[framework](group)
    for _ in range(3):
        step(lambda: None)
    evaluate(ddp)
    recorded = ring_file.read(ring_file.path_of(folder, rank).read_bytes())
    assert recorded.header.world_size == group.world_size
    return [(each.first, each.second) for each in recorded.records if each.event == Event.BATCH]


def evaluate(ddp):
    """Make a forward without a backward."""
    if hasattr(ddp, "_layers"):
        import paddle

        with paddle.no_grad():
            ddp(paddle.ones([8, 64]))
    else:
        import torch

        with torch.no_grad():
            ddp(torch.ones(8, 64))


@ranks(2, framework="framework")
@both
def test_the_sizes_of_batches_are_recorded_for_tune(group, framework):
    folder = Path(os.environ["TMPDIR"])
    assert batches_recorded(folder, group.rank, framework, group) == [(4, 4 * 64)] * 3


@ranks(1, framework="framework")
@both
def test_a_single_rank_records_the_sizes_of_its_batches_for_tune(group, framework):
    folder = Path(os.environ["TMPDIR"])
    assert batches_recorded(folder, 0, framework, group) == [(4, 4 * 64)] * 3


@ranks(2, framework="framework")
@both
def test_another_process_can_read_rates_values_norms_and_infinities(group, framework):
    folder = Path(os.environ["TMPDIR"])
    with mock.patch.dict(os.environ, {FOLDER_VARIABLE: str(folder)}):
        ddp, step = STEPS[framework](group)
    norms = []
    for number in range(4):
        step(lambda: None)
        norms.append(ddp.grad_norm())
        paceline.log("loss", number + group.rank)
    next(iter(ddp.parameters())).detach().fill_(math.inf)
    with pytest.warns(RuntimeWarning, match="holds an infinity or a NaN on all 2 ranks"):
        step(lambda: None)
    # The norm is recorded once per second: that of the first backward, or of a later one on a slow machine.
    norms.append(None if math.isnan(ddp.grad_norm()) else ddp.grad_norm())
    group.all_reduce(np.zeros(1))  # both ranks have recorded everything
    now = JobWatch(folder).look()
    group.all_reduce(np.zeros(1))  # neither process ends before the other has read the state
    assert (now.world_size, now.step, [each.rank for each in now.ranks]) == (2, 5, [0, 1])
    # After a few steps on a busy machine, the ranks' rates differ.
    assert now.steps_per_s == min(each.steps_per_s for each in now.ranks) > 0
    assert now.samples_per_s == pytest.approx(sum(4 * each.steps_per_s for each in now.ranks))
    for each in now.ranks:
        assert each.samples_per_s == pytest.approx(4 * each.steps_per_s)
        assert each.values == {"loss": 3 + each.rank}
        # The norm is recorded once per second; that of the last backward is not finite.
        assert each.norm in norms or not math.isfinite(each.norm)
        assert (each.nonfinite_rank, each.nonfinite > 0, each.failed) == (0, True, 0)
        assert each.is_alive and each.memory_bytes > 1 << 20 and each.worked_s > 0


@ranks(2, framework="framework")
@both
def test_the_statistics_match_the_backwards(group, framework):
    ddp, step = STEPS[framework](group)
    assert (ddp.stats().worked_s, ddp.stats().slow_rank, ddp.stats().passes) == ((), None, 0)
    for _ in range(6):
        step(lambda: None)
    stats = ddp.stats()
    assert (stats.rank, stats.world_size, stats.passes) == (group.rank, 2, 6)
    assert (stats.path, stats.bits) == (ddp.gradient_path, ddp.bits) == ("memory", "world")
    assert (stats.waited_s, stats.nonfinite, stats.num_unused) == (ddp.waited_s, {}, 0)
    assert stats.num_buckets == len(ddp.bucket_layout())
    assert stats.pass_bytes == sum(bucket.nbytes for bucket in ddp.bucket_layout())
    assert stats.waited_for_s[group.rank] == 0 <= sum(stats.waited_for_s) <= stats.waited_s
    # Every rank has the figures of all ranks, and they are the same everywhere.
    assert len(stats.worked_s) == 2 and all(seconds > 0 for seconds in stats.worked_s)
    assert_array_equal(group.all_gather(np.array(stats.worked_s)), [stats.worked_s] * 2)
    for figures in (stats.times_last, stats.held_up_s):
        assert_array_equal(group.all_gather(np.array(figures)), [figures] * 2)
    assert 4 <= sum(stats.times_last) <= 5  # of six backwards, without the first of each plan
    assert all(late_s > 0 for late_s, times in zip(stats.held_up_s, stats.times_last) if times)


@ranks(2)
def test_a_path_that_cannot_be_written_is_reported_on_every_rank(group, tmp_path):
    ddp, step = steps_in_torch(group)
    path = Path(tmp_path) / "none" / "out.json"
    with pytest.raises(ConfigError, match="The trace can't be written to"), ddp.trace(path):
        pytest.fail("nothing may run in it")
    step(lambda: None)
    assert ddp.num_good_passes == 1
