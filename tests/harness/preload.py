"""The imports that a fork server makes before it forks the first rank. Importing this file makes them.

It is a separate file because test files need all of `tests.harness`, and the server's file is a part of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import warnings
from pathlib import Path

import pytest

from tests.harness.huge_pages import use_huge_pages

_ROOT = Path(__file__).resolve().parents[2]
_FOR_ALL = (
    "numpy",
    "numpy.testing",
    "encodings.ascii",
    "encodings.idna",  # of host names
    "hypothesis",
    "paceline.collectives.init",
    "tests.harness.rank_main",
)
# The first optimizer of a process imports some of these. Importing torch's compiler takes longer than most
# tests.
_FOR = {
    "torch": (
        "torch",
        "paceline.torch",
        "torch._dynamo",
        "torch.profiler._cupti_monitor",
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    ),
    "paddle": (
        "paceline.paddle",
        "paddle.distributed.auto_parallel.fully_shard_fusion",
        "paddle.optimizer.fusion_utils",
    ),
    "numpy": (),
}


def preload(framework: str) -> None:
    """Import `framework` and the test files whose ranks may start with it, and no other framework."""
    gc.disable()  # these imports stay
    for name in (*_FOR_ALL, *_FOR[framework]):
        _import(name)
    if framework != "numpy":  # no test runs in this process
        with _without({"torch", "paddle"} - {framework}), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pytest, which imports each file too, reports them as errors
            for name in files_of_ranks():
                _import(name)
    if framework == "torch":
        _seed_without_stacks()
    # A rank's garbage collector would walk all objects of the framework, and copy their pages.
    gc.collect()
    gc.freeze()
    gc.enable()
    use_huge_pages()


def _seed_without_stacks() -> None:
    """Make torch.manual_seed skip the devices that this build of torch does not have.

    For each of them it would format the current stack for a possible later error. That takes 3 to 4 ms of a
    process's first call, because the lines are read from their files, and most ranks seed their models.
    """
    import torch

    for device, is_built in (
        (torch.cuda, torch.backends.cuda.is_built()),
        (torch.xpu, torch.xpu._is_compiled()),
        (torch.mtia, torch.mtia.is_available()),
    ):
        if not is_built:
            device.manual_seed_all = lambda seed: None


def files_of_ranks() -> list[str]:
    """The files that a rank imports to find its program, as modules."""
    folder = _ROOT / "tests"
    others = (path for path in folder.glob("*/test_*.py") if "ranks(" in path.read_text())
    found = {*(folder / "multiprocess").glob("*.py"), *others}
    return sorted(".".join(path.relative_to(_ROOT).with_suffix("").parts) for path in found)


def _import(name: str) -> None:
    # Ignore any error of a module here: the rank that needs the module reports it, in a readable place.
    with contextlib.suppress(Exception, pytest.skip.Exception):
        importlib.import_module(name)


@contextlib.contextmanager
def _without(names: set[str]):
    """A context in which importing these modules fails, and so do files that import them at their top."""
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None: what Python documents for this
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


if _framework := os.environ.pop("PACELINE_PRELOAD", None):
    preload(_framework)
