"""Settings for all tests: hypothesis without a deadline, an environment without a launcher's variables.

If PaddlePaddle is not installed, its test files are left out, and the first lines of the output say so.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import os
import signal
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Collection makes objects that live until the end. A third of its time went into looking for garbage among
# them.
gc.disable()

# The machine may be loaded, so the duration of an example shows nothing about the code.
settings.register_profile(
    "paceline", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("paceline")

# Under a launcher, pytest would pass its own rank to every test. Remove it before any test imports anything.
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)
os.environ.pop("PACELINE_JOB_ID", None)

# Without this, torch asks the CUDA runtime whether there is a GPU, and no fork of such a process can use one.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# If a script starts pytest in the background, pytest inherits an ignored SIGINT. It would pass that on to
# every process whose reaction to Ctrl-C is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_has_paddle = importlib.util.find_spec("paddle") is not None
collect_ignore_glob = [] if _has_paddle else ["*/test_paddle_*.py"]

# The files that take longest, by the CPU seconds of all their processes. Files that mostly wait are placed by
# their seconds on an idle machine. The processes of pytest take the files in this order, so that no process
# is left with a long file when the others have finished.
LONGEST_FILES = (
    "bench/test_benchmarks.py",
    "chaos/test_chaos.py",
    "fault/test_pairs.py",
    "differential/test_programs_torch.py",
    "differential/test_programs_paddle.py",
    "multiprocess/test_kept_errors.py",
    "multiprocess/test_hosts_devices.py",
    "multiprocess/test_host_compression.py",
    "launch/test_replace_ddp.py",
    "multiprocess/test_local_sgd.py",
    "multiprocess/test_hosts.py",
    "multiprocess/test_virtual_ranks.py",
    "multiprocess/test_silent_rank.py",
    "multiprocess/test_lost_while_wrapping.py",
    "multiprocess/test_ddp_aliases.py",
    "model/test_model.py",
    "multiprocess/test_exchanged_gradients.py",
    "launch/test_forked.py",
    "launch/test_failure.py",
    "multiprocess/test_conformance_refused_steps.py",
    "multiprocess/test_checkpointer.py",
    "pages/test_examples.py",
    "multiprocess/test_conformance.py",
    "multiprocess/test_paddle_aliases.py",
    "unit/test_harness.py",
    "fault/test_limits.py",
    "multiprocess/test_model_timeouts.py",
    "launch/test_two_shells.py",
    "fault/test_lost_ranks.py",
    "multiprocess/test_deadlines.py",
    "multiprocess/test_paddle_to_static.py",
    "multiprocess/test_ddp_written_buffers.py",
    "multiprocess/test_paddle_as_paddles.py",
    "multiprocess/test_paddle_comm_hooks.py",
    "multiprocess/test_conformance_shared_parameters.py",
    "multiprocess/test_conformance_hosts.py",
    "multiprocess/test_paddle_hosts.py",
    "multiprocess/test_preemption.py",
    "launch/test_spawn.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # the workers have not started yet; they share their servers
        from tests.harness import shared_servers

        shared_servers.share()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Where several processes of pytest collect the same files, let each begin with files of its own.

    In a fresh clone no file has been compiled yet, nor have its assertions been rewritten, which takes longer
    than all else. What one process has done so, the others find done when they come to that file.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    folders = filter(os.path.isdir, session.config.args)
    files = sorted(path for folder in folders for path in Path(folder).resolve().rglob("test_*.py"))
    root = Path(__file__).resolve().parents[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the process that collects the file again has them for errors
        for path in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # which collecting reports
                importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-combination", action="store_true", help="run tests with all combinations of their parameters"
    )


@pytest.hookimpl(trylast=True)  # only tests that -k and -m select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("every_combination"):
        _deselect_repeated_pairs(config, items)
    places = {os.path.join(os.path.dirname(__file__), name): n for n, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(str(item.path), len(places)))  # the sort is stable


def _deselect_repeated_pairs(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For tests with three or more parametrizations, keep only the runs that cover each pair of values."""
    pairs: dict[str, dict[pytest.Item, set[object]]] = {}
    for item in items:
        values = _values(item)
        if len(values) > 2:
            own = pairs.setdefault(item.nodeid.partition("[")[0], {})
            own[item] = set(itertools.combinations(values, 2))
    repeated = set[pytest.Item]()
    for of_test in pairs.values():
        missing = set[object]().union(*of_test.values())
        while missing:
            best = max(of_test, key=lambda item: len(of_test[item] & missing))
            missing -= of_test.pop(best)
        repeated.update(of_test)
    if repeated:
        config.hook.pytest_deselected(items=list(repeated))
        items[:] = [item for item in items if item not in repeated]


def _values(item: pytest.Item) -> list[tuple[tuple[str, int], ...]]:
    """The ids and the values that each parametrization has in this run of its test."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return []
    left = {name: id(value) for name, value in item.callspec.params.items()}
    found = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        found.append(tuple((name, left.pop(name)) for name in names))
    return [*found, *(((name, value),) for name, value in left.items())]


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


def _freeze() -> None:
    """Exempt the objects that live until the end (all tests, both frameworks) from garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> list[str]:
    return [] if _has_paddle else ["paddle: not installed, test_paddle_*.py are left out"]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """At the end of a file, end the ranks that its tests have kept; the fork servers stay."""
    if nextitem is None or nextitem.path != item.path:
        from tests.harness.run import end_kept_ranks

        end_kept_ranks()
        _freeze()
