"""docs/troubleshooting.md has a section for each error, with a text that the code really raises.

For each error class, a program of two ranks raises it as a user's program would. The page shows what rank 0
raises (or the only rank that raises), except for numbers that change between runs. A class without a program
or without a section fails a test.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline import _core, errors
from paceline.errors import PacelineError
from paceline.torch import DistributedDataParallel, ShardedOptimizer
from tests.harness import kept_ranks, ranks
from tests.launch.programs import train

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
# Base classes, which are not raised themselves.
BASES = {"PacelineError", "CollectiveError", "ReplicaError"}
# Numbers that differ between runs.
CHANGING = (
    (re.compile(r"\b(pid|process|stacks) \d+"), r"\1 N"),
    (re.compile(r"\d+(\.\d+)? (ms|s)\b"), r"N \2"),
    (re.compile(r"slab of \d+"), "slab of N"),
    (re.compile(r"\bat [0-9a-f]{32}\b"), "at JOB"),
    (re.compile(r"line \d+"), "line N"),
)


class Branching(nn.Module):
    """A model that can skip its head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, skips_head: bool = False) -> torch.Tensor:
        encoded = self.encoder(x)
        return encoded.sum() if skips_head else self.head(encoded).sum()


X = torch.ones(2, 4)


def wrap(group: Any, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Branching(), process_group=group, **options)


def group_closed_error(group: Any) -> None:
    group.close()
    group.barrier()


def config_error(group: Any) -> None:
    wrap(group, bucket_cap_mb=-25)


def config_type_error(group: Any) -> None:
    wrap(group, bucket_cap_mb="25")


def mismatch_error(group: Any) -> None:
    group.all_reduce(np.ones(4 if group.rank == 0 else 5, np.float32))


def model_mismatch_error(group: Any) -> None:
    model = Branching()
    if group.rank == 1:
        model.head = nn.Linear(4, 2)
    DistributedDataParallel(model, process_group=group)


def unused_parameter_error(group: Any) -> None:
    wrap(group)(X, skips_head=group.rank == 1).backward()


def skipped_backward_error(group: Any) -> None:
    ddp = wrap(group)
    ddp(X).backward()
    loss = ddp(X)
    if group.rank == 1:
        loss = ddp(X)  # as if the first batch's loss were not finite, and the script went on to the next
    loss.backward()


def graph_changed_error(group: Any) -> None:
    ddp = wrap(group, static_graph=True)
    for skips_head in (False, False, True):
        ddp.zero_grad()
        ddp(X, skips_head).backward()


def non_finite_gradient_error(group: Any) -> None:
    ddp = wrap(group, nonfinite="raise")
    ddp(X * (float("nan") if group.rank == 1 else 1.0)).backward()


def replicas_differ_error(group: Any) -> None:
    ddp = wrap(group)
    ddp(X).backward()
    if group.rank == 1:
        with torch.no_grad():
            ddp.module.head.weight.add_(1.0)
    ddp.check_replicas()


def region_error(group: Any) -> None:
    group.allocate(2**40, np.uint8)


def forked_error(group: Any) -> None:
    """The child sends its error through a pipe, and rank 0 raises it."""
    ddp = wrap(group)
    if group.rank == 1:
        return
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ddp(X)
        except PacelineError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    raise errors.ForkedError(text)


PROGRAMS: dict[str, Callable[[Any], None]] = {
    "GroupClosedError": group_closed_error,
    "ConfigError": config_error,
    "ConfigTypeError": config_type_error,
    "MismatchError": mismatch_error,
    "ModelMismatchError": model_mismatch_error,
    "UnusedParameterError": unused_parameter_error,
    "SkippedPassError": skipped_backward_error,
    "GraphChangedError": graph_changed_error,
    "NonFiniteGradientError": non_finite_gradient_error,
    "ReplicasDifferError": replicas_differ_error,
    "RegionError": region_error,
    "ForkedError": forked_error,
}
# These need ranks that are late, die, or never start, and have a test each.
ALONE = {"RendezvousError", "PeerLostError", "TornStepError", "DeadlineError", "LaunchError"}


def check(name: str, text: str) -> None:
    """Compare the text that the code raises with the page's section for this class."""
    (shown,) = re.findall(rf"^### {name}\n.*?^```\n(.*?)\n```$", PAGE.read_text(), re.M | re.S)
    assert settle(text) == settle(shown), f"docs/troubleshooting.md should show:\n{text}"


def settle(text: str) -> str:
    for pattern, word in CHANGING:
        text = pattern.sub(word, text)
    return text


def test_each_error_has_a_section_and_a_program() -> None:
    sections = re.findall(r"^### (\w+Error)$", PAGE.read_text(), re.M)
    assert sorted(sections) == sorted(set(errors.__all__) - BASES)
    assert set(sections) == PROGRAMS.keys() | ALONE


@pytest.mark.parametrize("name", PROGRAMS)
@kept_ranks(2)
def test_the_page_shows_the_error_that_is_raised(group: Any, name: str) -> None:
    try:
        PROGRAMS[name](group)
    except getattr(errors, name) as error:
        if group.rank == 0:
            check(name, str(error))
    else:
        assert name == "ForkedError" and group.rank == 1


@ranks(2, dies={1: signal.SIGKILL})
def test_a_rank_that_died(group: Any) -> None:
    ddp = wrap(group)
    ddp(X).backward()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.PeerLostError) as caught:
        ddp(X).backward()
    check("PeerLostError", str(caught.value))


@ranks(2, dies={1: signal.SIGKILL})
def test_half_a_step(group: Any) -> None:
    ddp = wrap(group, share_parameters=True)
    optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    ddp(X).backward()
    if group.rank == 1:
        _core.arm_fault(_core.fault_points().index("step_begun"), _core.FAULT_ACTIONS["kill"], 1)
    with pytest.raises(errors.PeerLostError) as lost:
        optimizer.step()
    assert lost.value.step_is_complete is False
    with pytest.raises(errors.TornStepError) as caught:
        ddp(X)
    check("TornStepError", str(caught.value))


@kept_ranks(2)
def test_a_rank_that_is_late(group: Any, tmp_path: Path) -> None:
    raised = tmp_path / "rank 0 has raised"
    if group.rank == 1:
        while not raised.exists():  # as long as rank 0 waits
            time.sleep(0.01)
        return
    with pytest.raises(errors.DeadlineError) as late:
        group.barrier(timeout_s=0.3)
    raised.touch()
    check("DeadlineError", str(late.value))


@ranks(2, group=None)
def test_a_rank_that_was_never_started(rank: int) -> None:
    if rank == 1:
        return
    with pytest.raises(errors.RendezvousError) as caught:
        paceline.init(timeout_s=0.5)
    check("RendezvousError", str(caught.value))


def test_a_process_that_failed() -> None:
    with pytest.raises(errors.LaunchError) as caught:
        paceline.spawn(train, nprocs=2)
    check("LaunchError", re.sub(r'File ".*?"', 'File "train.py"', str(caught.value)))
