"""What all tests share: hypothesis without a deadline, and an environment that knows of no launcher.

Where PaddlePaddle is not installed, the files that test it are left out, and the first lines of output say
so.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Collecting makes objects that stay until the end, among which a third of its time went to look for garbage.
gc.disable()

# The machine may be loaded: how long an example takes says nothing about the code.
settings.register_profile(
    "paceline", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("paceline")

# Started under a launcher, pytest would hand its rank to every test. Before any test imports anything.
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)
os.environ.pop("PACELINE_JOB_ID", None)

# Else torch asks the CUDA runtime whether there is a GPU, and no fork of a process that did can use one.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Started in the background of a script, pytest inherits an ignored SIGINT, and would hand that on to every
# process whose answer to Ctrl-C a test asks for.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_has_paddle = importlib.util.find_spec("paddle") is not None
collect_ignore_glob = [] if _has_paddle else ["*/test_paddle_*.py"]

# The files that take longest, by the CPU seconds of all their processes; those that mostly wait, by the
# seconds that they take on an idle machine. The processes of pytest share the files in this order, so that
# none has a long one left when the others have none.
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
    "launch/test_forked.py",
    "launch/test_failure.py",
    "multiprocess/test_conformance_refused_steps.py",
    "multiprocess/test_checkpointer.py",
    "multiprocess/test_killed_checkpoints.py",
    "pages/test_examples.py",
    "multiprocess/test_conformance.py",
    "launch/test_restricted_machines.py",
    "multiprocess/test_paddle_aliases.py",
    "unit/test_harness.py",
    "fault/test_limits.py",
    "launch/test_exit_warning.py",
    "launch/test_full_output.py",
    "multiprocess/test_sampler_resume.py",
    "multiprocess/test_model_timeouts.py",
    "launch/test_two_shells.py",
    "fault/test_lost_ranks.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # the workers, which have not started yet, share their servers
        from tests.harness import shared_servers

        shared_servers.share()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-combination", action="store_true", help="run tests with all combinations of their parameters"
    )


@pytest.hookimpl(trylast=True)  # of what -k and -m have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("every_combination"):
        _deselect_repeated_pairs(config, items)
    places = {os.path.join(os.path.dirname(__file__), name): n for n, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(str(item.path), len(places)))  # stable


def _deselect_repeated_pairs(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with three or more parametrizations, keep as few runs as have each pair of two values."""
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
    """What each parametrization has for this run of its test: its names, and which objects they stand for."""
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
    """Keep the garbage collector from walking what stays until the end: all tests, and both frameworks."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> list[str]:
    return [] if _has_paddle else ["paddle: not installed, test_paddle_*.py are left out"]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """At the end of a file, let the ranks end that its tests have kept; what they have imported stays."""
    if nextitem is None or nextitem.path != item.path:
        from tests.harness.run import end_kept_ranks

        end_kept_ranks()
        _freeze()
