"""Runs each block of Python code in the documentation on two ranks, with the names that a reader would have.

A page's blocks run one after the other in one namespace, as if pasted into a session. This file prepares the
names that a block uses (a model, a data set); a new block that uses other names fails.
"""

from __future__ import annotations

import doctest
import io
import itertools
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.torch
from paceline.torch.backend.registration import OLDEST
from tests.harness import ranks
from tests.harness.warm import warm_python
from tests.multiprocess.torch_groups import needs_backend

DOCS = Path(__file__).resolve().parents[2] / "docs"
# Blocks tested elsewhere: they need Ray (tests/integrations/test_ray.py) or TensorBoard
# (tests/unit/test_tensorboard.py).
ELSEWHERE = {
    "launching.md": {"import paceline.ray"},
    "live.md": {"from paceline.torch import log_to_tensorboard"},
}

ON_OUR_BACKEND = {"getting_started.md"}

Names = dict[str, Any]


def blocks(page: str) -> list[str]:
    """Returns the Python blocks of a page, in their order."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


def pages() -> list[str]:
    """Returns all pages with such blocks, without docs/design and the page about notebooks.

    tests/pages/test_notebook.py runs the latter in a Jupyter kernel.
    """
    return sorted(page.name for page in DOCS.glob("*.md") if blocks(page.name) and page.name != "notebook.md")


def of_getting_started(names: Names, number: int) -> None:
    names |= {"Model": lambda: nn.Linear(4, 3), "dataset": classes(64)}


def of_coming_from_ddp(names: Names, number: int) -> None:
    """Its block needs no names."""


def of_launching(names: Names, number: int) -> None:
    names["Model"] = lambda: nn.Linear(4, 3)


def of_checkpoints(names: Names, number: int) -> None:
    names |= {"Model": lambda: nn.Linear(4, 3), "dataset": classes(64), "DataLoader": DataLoader}
    names |= {"torch": torch, "rank": dist.get_rank(), "loss_of": nn.functional.cross_entropy}
    os.chdir(os.environ["TMPDIR"])  # shared by all ranks
    names["path"] = Path("state.pt")
    dist.barrier()  # wait until rank 0 has saved


def of_same_result(names: Names, number: int) -> None:
    names |= {"Model": lambda: nn.Linear(4, 3), "dataset": classes(64), "DataLoader": DataLoader}
    names |= {"torch": torch, "loss_of": nn.functional.cross_entropy}
    os.chdir(os.environ["TMPDIR"])  # shared by all ranks


def of_concepts(names: Names, number: int) -> None:
    names["DistributedDataParallel"] = paceline.torch.DistributedDataParallel
    names["model"] = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if number == 0:
        names["ddp"] = paceline.torch.DistributedDataParallel(names["model"], bucket_cap_mb=0.0001)
        names["ddp"](torch.ones(1, 4)).sum().backward()
    else:
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)


def of_one_model(names: Names, number: int) -> None:
    names |= {"DistributedDataParallel": paceline.torch.DistributedDataParallel, "torch": torch}
    names.setdefault("model", nn.Linear(4, 3))
    names |= {"batch": torch.ones(2, 4), "loss": torch.sum, "request": torch.ones(4)}
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    names["load_model"] = lambda: nn.Linear(4, 3)


def of_data(names: Names, number: int) -> None:
    names.setdefault("torch", torch)
    names["dataset"] = classes(64)
    names["DataLoader"] = DataLoader
    names["loss_of"] = nn.functional.cross_entropy
    # The page says "or torch's, with the same argument". The tests of samplers use Paddle's DataLoader.
    names["paddle"] = types.SimpleNamespace(io=torch.utils.data)
    names["model"] = names["ddp"] = paceline.torch.DistributedDataParallel(nn.Linear(4, 3))
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    block = blocks("data.md")[number]
    if "sampler.commit" in block:
        names["loader"] = DataLoader(names["dataset"], batch_size=16, sampler=names["sampler"])
        names["saved"] = []
        names |= {"it_is_time": lambda: True, "save": names["saved"].append}
    if "checkpoint" in block:
        names["checkpoint"] = names["saved"][-1]
    names |= {"train_indices": np.arange(0, 64, 2), "weights": np.linspace(1.0, 2.0, 64)}
    names |= {"lengths": np.arange(1, 1025), "pad": None, "table": range(100_000)}
    if "BucketedSampler" in block:
        names["dataset"] = range(1024)
    names |= {"glob": lambda pattern: [str(path) for path in DOCS.glob("*.md")], "epochs": 2}
    if "EvaluationSampler" in block:
        names["dataset"] = [torch.ones(4) * number for number in range(100)]
    if "ddp.weight(len(inputs))" in block:
        names["batches"] = DataLoader(classes(24), batch_size=16)
    if "ddp.finish" in block:
        names["loader"] = DataLoader(classes(24 + 8 * dist.get_rank()), batch_size=16)


def of_local_sgd(names: Names, number: int) -> None:
    names |= {"torch": torch, "rank": dist.get_rank(), "path": io.BytesIO()}
    if number == 0:
        names["model"] = nn.Linear(4, 3)
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        names["loader"] = DataLoader(torch.ones(8, 4), batch_size=2)
        names["loss"] = lambda output: output.square().mean()


def of_preemption(names: Names, number: int) -> None:
    os.chdir(os.environ["TMPDIR"])  # shared by all ranks
    ddp = names["ddp"] = paceline.torch.DistributedDataParallel(nn.Linear(4, 3))
    names |= {"paceline": paceline, "loss_of": nn.functional.cross_entropy}
    names["optimizer"] = torch.optim.SGD(ddp.parameters(), lr=0.1)
    names["batches"] = types.SimpleNamespace(commit=lambda: None)
    names["loader"] = DataLoader(classes(64), batch_size=16)


def of_sharded_optimizer(names: Names, number: int) -> None:
    names |= {"torch": torch, "paceline": paceline, "rank": dist.get_rank(), "batch": torch.ones(2, 4)}
    names["path"] = Path(os.environ["TMPDIR"]) / "optimizer.pt"
    if number == 0:
        names["ddp"] = paceline.torch.DistributedDataParallel(nn.Linear(4, 3))
        names["model"] = nn.Linear(4, 3)
    dist.barrier()  # wait until rank 0 has saved


def of_trainers(names: Names, number: int) -> None:
    """Its blocks need no names. They replace torch's classes, in this process only."""


def of_tracing(names: Names, number: int) -> None:
    os.chdir(os.environ["TMPDIR"])  # the trace is written there
    ddp = names["ddp"] = paceline.torch.DistributedDataParallel(nn.Linear(4, 3))
    names["loader"] = DataLoader(classes(64), batch_size=16)
    names["itertools"] = itertools
    names["train_step"] = lambda batch: nn.functional.cross_entropy(ddp(batch[0]), batch[1]).backward()


def of_live(names: Names, number: int) -> None:
    names |= {"paceline": paceline, "inputs": torch.ones(2, 4)}
    names["ddp"] = paceline.torch.DistributedDataParallel(nn.Linear(4, 3))


NEEDS_GROUP = (
    "checkpoints.md",
    "concepts.md",
    "data.md",
    "live.md",
    "local_sgd.md",
    "one-model.md",
    "preemption.md",
    "sharded-optimizer.md",
    "tracing.md",
)
PREPARED: dict[str, Callable[[Names, int], None]] = {
    "checkpoints.md": of_checkpoints,
    "coming-from-ddp.md": of_coming_from_ddp,
    "concepts.md": of_concepts,
    "data.md": of_data,
    "getting_started.md": of_getting_started,
    "launching.md": of_launching,
    "live.md": of_live,
    "local_sgd.md": of_local_sgd,
    "one-model.md": of_one_model,
    "preemption.md": of_preemption,
    "same-result.md": of_same_result,
    "sharded-optimizer.md": of_sharded_optimizer,
    "tracing.md": of_tracing,
    "trainers.md": of_trainers,
}


def classes(count: int) -> TensorDataset:
    """A data set of samples with four numbers and one of three classes."""
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 3)


def run(block: str, names: Names, page: str) -> None:
    """Runs a block as a script, or as a doctest whose output must equal the page's."""
    if not block.startswith(">>>"):
        exec(compile(block, f"docs/{page}", "exec"), names)
        return
    example = doctest.DocTestParser().get_doctest(block, names, page, page, 0)
    output: list[str] = []
    assert doctest.DocTestRunner(verbose=False).run(example, out=output.append).failed == 0, "".join(output)


def test_every_page_with_code_is_prepared() -> None:
    assert pages() == sorted(PREPARED)


@pytest.fixture
def warm_torch() -> str:
    return warm_python("torch")


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # pages use four workers
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=needs_backend if page in ON_OUR_BACKEND else ()) for page in sorted(PREPARED)],
)
@ranks(2, group=None)
def test_the_code_of_a_page_runs(
    rank: int, page: str, warm_torch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_torch)  # the process that writes checkpoints
    names: Names = {"__name__": "__main__"}
    if page in NEEDS_GROUP:  # the other pages create their own group
        dist.init_process_group("paceline" if torch.__version__ >= OLDEST else "gloo")
    for number, block in enumerate(blocks(page)):
        if not any(block.startswith(begin) for begin in ELSEWHERE.get(page, ())):
            PREPARED[page](names, number)
            run(block, names, page)
    if dist.is_initialized():
        dist.destroy_process_group()
