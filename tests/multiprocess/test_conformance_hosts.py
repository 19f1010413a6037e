"""Failures of a rank in a job of several hosts, in both front ends: ranks of other hosts get the error, too.

Each rank says on which host it is; the framework's process group connects the hosts.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from paceline.errors import ConfigError, DeadlineError, GroupClosedError, PeerLostError
from tests.harness import ranks
from tests.multiprocess.conformance_numpy import batch
from tests.multiprocess.rank_signals import barrier, publish, wait_until_published
from tests.multiprocess.test_conformance import adapter
from tests.several_hosts import be_on_host

# The host of each rank.
BLOCKS = (0, 0, 1, 1)
ONE_AND_THREE = (0, 1, 1, 1)
ALONE = (0, 1, 2, 3)
PATIENT_S = 90.0  # no rank waits this long when the failure is reported at once
BOUND_S = 60.0  # enough on a busy machine
FAILS = 3

paths = pytest.mark.parametrize(
    ("framework", "through", "layout"),
    [
        ("torch", "auto", BLOCKS),
        ("torch", "auto", ONE_AND_THREE),
        ("torch", "group", BLOCKS),
        ("paddle", "auto", BLOCKS),
        ("paddle", "auto", ONE_AND_THREE),
        ("paddle", "group", BLOCKS),
    ],
)


def wrap(rank: int, framework: str, layout: tuple[int, ...], **options: Any) -> tuple[ModuleType, Any]:
    """The framework's adapter, and a wrapped model that has made two backwards over these hosts."""
    be_on_host(layout[rank])
    adapter(f"{framework}.distributed").join(rank, len(layout))
    do = adapter(framework)
    barrier("joined", rank)  # here and below: a short timeout must cover only the backward under test
    wrapped = do.wrap(do.network(), None, **options)
    assert wrapped.gradient_path == ("group" if options.get("reduce_through") == "group" else "hosts")
    for step in range(2):
        barrier(f"step {step}", rank)
        backward(do, wrapped, step, rank)
    barrier("through", rank)  # else another host may still be in the backward after which this rank fails
    return do, wrapped


def backward(do: ModuleType, wrapped: Any, step: int, rank: int) -> None:
    do.clear(wrapped)
    do.backward(do.loss(wrapped, np.split(batch(seed=step), 4)[rank]))


@paths
@ranks(4, group=None, framework="framework", dies={FAILS: signal.SIGKILL})
def test_a_rank_that_is_killed_is_named(
    rank: int, framework: str, through: str, layout: tuple[int, ...]
) -> None:
    do, wrapped = wrap(rank, framework, layout, timeout_s=PATIENT_S, reduce_through=through)
    if rank == FAILS:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        backward(do, wrapped, 2, rank)
    assert time.monotonic() - started < BOUND_S
    assert caught.value.lost == (FAILS,), str(caught.value)
    with pytest.raises((GroupClosedError, PeerLostError)):
        backward(do, wrapped, 3, rank)


@paths
@ranks(4, group=None, framework="framework", dies={FAILS: ValueError})
def test_the_text_of_an_exception_is_reported_at_once(
    rank: int, framework: str, through: str, layout: tuple[int, ...]
) -> None:
    do, wrapped = wrap(rank, framework, layout, timeout_s=PATIENT_S, reduce_through=through)
    if rank == FAILS:
        error = ValueError("the cause")
        sys.excepthook(ValueError, error, None)  # by hand: the harness catches the error
        wait_until_published("raised", range(FAILS))  # with a framework imported, exit takes long
        raise error
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        backward(do, wrapped, 2, rank)
    publish("raised", rank)
    assert time.monotonic() - started < BOUND_S
    wait_until_published("raised", range(FAILS))  # and no other rank exits before
    assert "the cause" in str(caught.value) and caught.value.lost == (FAILS,), str(caught.value)


@pytest.mark.parametrize(
    ("framework", "layout"),
    [("torch", BLOCKS), ("torch", ALONE), ("torch", ONE_AND_THREE), ("paddle", BLOCKS)],
)
@ranks(4, group=None, framework="framework", dies={FAILS: signal.SIGKILL})
def test_a_rank_that_does_not_come_is_named_at_the_deadline(
    rank: int, framework: str, layout: tuple[int, ...]
) -> None:
    do, wrapped = wrap(rank, framework, layout, timeout_s=4)
    if rank == FAILS:
        wait_until_published("raised", range(FAILS))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DeadlineError) as caught:
        backward(do, wrapped, 2, rank)
    assert FAILS in caught.value.late, str(caught.value)
    if layout != ALONE:  # rank 2 shares memory with rank 3, and reports to the other hosts
        assert caught.value.late == (FAILS,), str(caught.value)
    publish("raised", rank)


@pytest.mark.parametrize("framework", ["torch", "paddle"])
@pytest.mark.parametrize("through", ["memory", "group", "hosts"])
@ranks(2, group=None, framework="framework")
def test_an_error_of_forward_that_a_rank_has_caught_is_quoted(
    rank: int, framework: str, through: str
) -> None:
    be_on_host(rank if through == "hosts" else 0)
    adapter(f"{framework}.distributed").join(rank, 2)
    do, model = adapter(framework), adapter(framework).network()
    wrapped = do.wrap(
        model, None, timeout_s=PATIENT_S, reduce_through="auto" if through == "hosts" else through
    )
    assert wrapped.gradient_path == through
    do.backward(do.loss(wrapped, batch()))
    if rank == 1:
        model[0].weight = do.network()[0].weight
        with pytest.raises(ConfigError, match=r"replaced: 0\.weight"):
            do.loss(wrapped, batch())
        return  # like a script that catches the error and exits
    with pytest.raises(PeerLostError) as caught:
        do.backward(do.loss(wrapped, batch()))
    assert caught.value.lost == (1,)
    text = str(caught.value)
    assert "has left; raised ConfigError: " in text and "replaced: 0.weight" in text, text
    assert "the error that it raised" in caught.value.likely, text
