"""The memory that a training takes: computed, against tables of measurements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.workers.torch_models import wide
from paceline.errors import ConfigError
from paceline.torch import plan_memory

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def measured(ranks: int) -> dict[str, float]:
    """The memory of each variant, as a multiple of the parameters, by its label in the table."""
    table = (RESULTS / f"memory-of-training-{ranks}-ranks_epyc-2c.md").read_text()
    return {
        label: float(times) for label, times in re.findall(r"^\| (.+?) \| .+? \| ([\d.]+) \|", table, re.M)
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_plan_says_what_was_measured(ranks):
    plan = plan_memory(wide, ranks)
    planned = {memory.label: memory.total / plan.sizes.parameters for memory in plan.ways.values()}
    found = measured(ranks)
    assert len(found) == 8 and found.keys() <= planned.keys()
    for label, times in found.items():
        # The halves of two ranks' gradients that are never copied are not in the plan, which states an upper
        # bound.
        at_most = ranks == 2 and label == "one model, ShardedOptimizer"
        assert planned[label] == pytest.approx(times + at_most, rel=0.005), label


class Needs(nn.Module):
    """A model that looks at values while it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.trained = nn.Parameter(torch.ones(100 * int(torch.ones(2).sum().item())))
        self.register_buffer("counted", torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("optimizer", "options", "state"),
    [
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 800),
        (torch.optim.Adam, {}, 1604),
        (torch.optim.Adam, {"fused": True, "amsgrad": True}, 2404),
    ],
)
def test_a_model_of_which_parts_are_frozen_and_states_of_optimizers(optimizer, options, state):
    plan = plan_memory(Needs, 4, 2, optimizer, **options)
    assert plan.is_allocated
    sizes = plan.sizes
    assert (sizes.parameters, sizes.buffers, sizes.gradients, sizes.gradient_buffer) == (828, 24, 800, 832)
    assert sizes.state == state
    one_model = plan.ways["paceline_shared_view"]
    assert one_model.parameters == 828 + 2 * 24
    assert (one_model.gradients, one_model.state) == (2 * 832, state // 2)
    torch_view = plan.ways["torch_view"]
    assert torch_view.total == 2 * (828 + 24 + 800 + state)


def test_nothing_is_allocated_for_a_model_that_would_not_fit():
    plan = plan_memory(lambda: nn.Linear(1 << 20, 1 << 20, bias=False), 64)
    assert not plan.is_allocated
    assert plan.sizes.parameters == 1 << 42
    assert plan.sizes.state == pytest.approx(2 << 42)


def test_factored_states_are_counted():
    plan = plan_memory(lambda: nn.Linear(300, 200, bias=False), 2, 1, torch.optim.Adafactor)
    assert 4 * 500 <= plan.sizes.state < 4 * 600


def test_what_cannot_be_planned():
    with pytest.raises(ConfigError, match="ranks=3, hosts=2"):
        plan_memory(nn.Identity, 3, 2)
    with pytest.raises(ConfigError, match=r"a torch.nn.Module"):
        plan_memory(lambda: "model", 2)
