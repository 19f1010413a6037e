"""The decorator `@ranks(4)`: the body of a test is the program of one rank."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.harness.report import RanksFailed
from tests.harness.run import run_ranks
from tests.harness.verdict import Death

NO_PADDLE = "PaddlePaddle is not installed"
needs_paddle = pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason=NO_PADDLE)


def ranks(
    world_size: int | str,
    *,
    group: str | None = "paceline",
    framework: str = "torch",
    dies: Mapping[int, Death] | None = None,
    deadline_s: float = 120.0,
    kept: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the decorated test in `world_size` processes.

    Fixtures and parametrized arguments reach every rank, pickled. Marks, skips among them, are decided
    in the parent; a body that skips is reported as a failure, because the other ranks would wait for it.

    Args:
        world_size: Number of ranks, or the name of the test's parameter that holds it.
        group: 'paceline': the body's first argument is a `paceline.Group` over all ranks.
            A backend of torch.distributed ('gloo'): torch.distributed is initialised, without a port,
            and the first argument is the rank. None: only the environment is set (RANK, WORLD_SIZE,
            LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, PACELINE_JOB_ID); the first
            argument is the rank.
        framework: What the server that the ranks start from has imported, 'torch' or 'paddle', or the name
            of the test's parameter that holds it; what follows a dot is for the test, and kept ranks of
            'paddle.distributed' stay in Paddle's group. Skipped where Paddle is not installed.
        dies: Ranks that must not return, and how they end: a signal, an exit status, or an exception type.
        deadline_s: After this many seconds the stacks of all ranks are shown and the test fails.
        kept: The processes are those of the test before in the same file, if it had `kept`, and they stay
            for the next one: a process costs more than a small program. Not for tests of how a process begins
            or ends, of signals, or of what it may hold. What a program changes in its process besides
            fixtures like monkeypatch, it takes back with `after_test`.

    Example:
        >>> @ranks(2)
        ... def test_sum(group):
        ...     array = np.full(3, group.rank + 1)      # rank 0 holds 1s and rank 1 holds 2s
        ...     group.all_reduce(array)
        ...     assert_array_equal(array, [3, 3, 3])    # checked on both
    """

    def decorate(program: Callable[..., Any]) -> Callable[..., None]:
        _, *parameters = inspect.signature(program).parameters.values()
        names = [p.name for p in parameters]
        if isinstance(world_size, str) and world_size not in names:
            raise TypeError(f"@ranks({world_size!r}): {program.__name__} has no parameter of that name")

        @functools.wraps(program)
        def test(**kwargs: Any) -> None:
            __tracebackhide__ = True
            if group not in (None, "paceline") and importlib.util.find_spec("torch") is None:
                pytest.skip("torch is not installed")
            count = kwargs[world_size] if isinstance(world_size, str) else world_size
            imported = kwargs.get(framework, framework)
            if imported.startswith("paddle") and importlib.util.find_spec("paddle") is None:
                pytest.skip(NO_PADDLE)
            options = {
                "group": group,
                "framework": imported,
                "dies": dies,
                "deadline_s": deadline_s,
                "kept": kept,
            }
            try:
                run_ranks(test, count, kwargs, **options)
            except RanksFailed as failed:
                pytest.fail(str(failed), pytrace=False)

        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.program = program  # type: ignore[attr-defined]
        return test

    return decorate


kept_ranks = functools.partial(ranks, kept=True)
"""Like `ranks`, but the processes stay from one test of a file to the next."""
