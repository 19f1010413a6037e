"""What all tests share: hypothesis without a deadline, and an environment that knows of no launcher.

Where PaddlePaddle is not installed, the files that test it are left out, and the first lines of output say
so.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

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

# The files that take longest, by the seconds that they take on an idle machine. The processes of pytest share
# the files in this order, so that none has a long one left when the others have none.
LONGEST_FILES = (
    "bench/test_benchmarks.py",
    "chaos/test_chaos.py",
    "fault/test_pairs.py",
    "differential/test_programs_torch.py",
    "differential/test_programs_paddle.py",
    "multiprocess/test_kept_errors.py",
    "multiprocess/test_hosts_devices.py",
    "multiprocess/test_host_compression.py",
    "multiprocess/test_local_sgd.py",
    "launch/test_replace_ddp.py",
    "multiprocess/test_silent_rank.py",
    "multiprocess/test_lost_while_wrapping.py",
    "model/test_model.py",
    "pages/test_examples.py",
    "multiprocess/test_paddle_aliases.py",
    "multiprocess/test_ddp_aliases.py",
    "fault/test_limits.py",
    "multiprocess/test_sampler_resume.py",
    "launch/test_exit_warning.py",
    "multiprocess/test_model_timeouts.py",
    "multiprocess/test_hosts.py",
    "multiprocess/test_conformance_refused_steps.py",
    "multiprocess/test_conformance_shared_parameters.py",
    "launch/test_forked.py",
    "launch/test_trace.py",
    "unit/test_harness.py",
    "fault/test_lost_ranks.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # the workers, which have not started yet, share their servers
        from tests.harness import shared_servers

        shared_servers.share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {os.path.join(os.path.dirname(__file__), name): n for n, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(str(item.path), len(places)))  # stable


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking all tests and both frameworks, which stay until the end."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> list[str]:
    return [] if _has_paddle else ["paddle: not installed, test_paddle_*.py are left out"]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let the ranks that the tests of a file have kept end with the file."""
    if nextitem is None or nextitem.path != item.path:
        from tests.harness.run import end_kept_ranks

        end_kept_ranks()
