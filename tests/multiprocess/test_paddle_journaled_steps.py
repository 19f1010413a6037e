"""paceline.paddle.ShardedOptimizer(journal=True): its bits, its state, survivors' steps, and what is refused.

tests/fault/test_lost_steps.py kills ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle import optimizer as optim
from paddle.utils import unique_name

from paceline.errors import ConfigError, PeerLostError
from paceline.paddle import DataParallel, ShardedOptimizer
from paceline.sharding import journal_layout
from tests.multiprocess.paddle_models import drop_grad, kept_ranks, ranks
from tests.multiprocess.test_paddle_hosts import place
from tests.multiprocess.test_paddle_sharded_optimizer import ELEMENTWISE, same_bits
from tests.multiprocess.test_paddle_sharded_state import assert_same_state

SHAPES = ([37, 41], [300], [1], [700], [3])
NAMES = [f"{cls.__name__}{number}" for number, (cls, _) in enumerate(ELEMENTWISE)]


class Parameters(nn.Layer):
    """Parameters of several blocks, some cut, and a frozen one; with the same names in each instance."""

    def __init__(self, dtype: str = "float32") -> None:
        drawn = np.random.default_rng(0)
        with unique_name.guard():
            super().__init__()
            self.all = nn.ParameterList([self.create_parameter(shape, dtype=dtype) for shape in SHAPES])
        for parameter in self.all:
            parameter.set_value(paddle.to_tensor(drawn.standard_normal(parameter.shape)).astype(dtype))
        self.all[4].stop_gradient = True

    def forward(self) -> Any:
        return sum(parameter.sum() for parameter in self.all)


def give(models: list[nn.Layer], number: int, has_all: bool = False) -> None:
    """Set the same gradients in all models; without `has_all`, parameter 1 gets one in every other step."""
    drawn = np.random.default_rng(1 + number)
    for index, shape in enumerate(SHAPES):
        gradient = drawn.standard_normal(shape).astype("float32")
        for model in models:
            parameter = model.all[index]
            if parameter.stop_gradient:
                continue
            has = has_all or index != 1 or number % 2
            if has:
                parameter.grad = paddle.to_tensor(gradient).astype(parameter.dtype)
            else:
                drop_grad(parameter)


def make(
    group: Any, optimizer_class: type[Any], options: dict[str, Any], dtype: str = "float32"
) -> tuple[nn.Layer, Any, nn.Layer, Any]:
    """Return a wrapped model and its optimizer with a journal, and the same for this rank alone."""
    journal_layout.BLOCK_BYTES = 1024
    shared, alone = Parameters(dtype), Parameters(dtype)
    model = DataParallel(shared, group=group, share_parameters=True)
    optimizer = ShardedOptimizer(model.parameters(), optimizer_class, group, journal=True, **options)
    optimizer.model = model
    return shared, optimizer, alone, optimizer_class(parameters=alone.parameters(), **options)


def assert_same(shared: nn.Layer, alone: nn.Layer) -> None:
    for one, other in zip(shared.all, alone.all, strict=True):
        assert same_bits(one, other)


def whole_state(optimizer: Any) -> dict[str, Any]:
    """Return the whole state, on every rank."""
    found: dict[str, Any] = {}
    for rank in range(optimizer.world_size):
        optimizer.consolidate_state_dict(to=rank)
        if rank == optimizer.rank:
            found = optimizer.state_dict()
    return found


def step_alone(reference: Any) -> None:
    with unique_name.guard():  # so that its state has the names of a process's first optimizer
        reference.step()


@pytest.mark.parametrize("number", range(len(ELEMENTWISE)), ids=NAMES)
@kept_ranks(2)
def test_bits_and_state_are_those_of_the_whole_optimizer(group: Any, number: int) -> None:
    optimizer_class, options = ELEMENTWISE[number]
    shared, optimizer, alone, reference = make(group, optimizer_class, options)
    assert len(optimizer.optims) > 2
    for step in range(6):
        give(
            [shared, alone], step, has_all="use_multi_tensor" in options
        )  # it needs all gradients in each step
        optimizer.step()
        step_alone(reference)
        if step == 3:  # loaded state goes to the journal again
            optimizer.set_state_dict(whole_state(optimizer))
    assert_same(shared, alone)
    assert_same_state(whole_state(optimizer), reference.state_dict())


def decays(name: str) -> bool:
    return "w_0" in name and "_1." not in name


CASES: dict[str, tuple[type[Any], Any, str]] = {
    "clip, schedule, decay by name": (
        optim.AdamW,
        lambda: {
            "learning_rate": optim.lr.StepDecay(0.1, 1),
            "grad_clip": nn.ClipGradByGlobalNorm(0.5),
            "apply_decay_param_fun": decays,
        },
        "float32",
    ),
    "master weights": (
        optim.SGD,
        lambda: {"learning_rate": 0.1, "multi_precision": True},
        "bfloat16",
    ),
    "momentum": (optim.Momentum, lambda: {"learning_rate": 0.1, "use_nesterov": True}, "float32"),
    "plain operations": (ELEMENTWISE[-1][0], dict, "float32"),
}


@pytest.mark.parametrize("step_lost", [0, 2])
@pytest.mark.parametrize("case", CASES)
@kept_ranks(3)
def test_survivors_finish_the_step(group: Any, case: str, step_lost: int) -> None:
    """A rank raises after its second block is written; settings that changed since the last step count."""
    optimizer_class, options, dtype = CASES[case]
    shared, optimizer, alone, reference = make(group, optimizer_class, options(), dtype)
    for step in range(step_lost + 1):
        give([shared, alone], step)
        if case == "momentum" and step == step_lost:
            reference.set_lr(0.3)
            optimizer.set_lr(0.3)
        step_alone(reference)
        if step < step_lost:
            optimizer.step()
            if case.startswith("clip"):
                reference._learning_rate.step()
                optimizer._learning_rate.step()
    if group.rank == 1:
        failing = optimizer.optims[1]
        step_block = failing.step

        def raising() -> None:
            step_block()
            raise RuntimeError("in the middle")

        failing.step = raising
        with pytest.raises(RuntimeError, match="in the middle"):
            optimizer.step()
        return
    with pytest.raises(PeerLostError, match="in the middle") as caught:
        optimizer.step()
    assert caught.value.step_is_complete
    assert_same(shared, alone)
    optimizer.consolidate_state_dict()
    assert_same_state(
        {name: each for name, each in optimizer.state_dict().items() if name != "LR_Scheduler"},
        {name: each for name, each in reference.state_dict().items() if name != "LR_Scheduler"},
    )


@kept_ranks(2)
def test_a_scaler_skips_the_steps_of_all_blocks(group: Any) -> None:
    """On CPUs a GradScaler does nothing, so the test sets in the optimizers what a GradScaler would."""
    shared, optimizer, alone, reference = make(group, optim.AdamW, {"learning_rate": 0.1})
    for step in range(4):
        give([shared, alone], step)
        before = [parameter.clone() for parameter in shared.all]
        for each in (optimizer, reference):
            each._set_auxiliary_var("found_inf", paddle.to_tensor([step == 2]))
            each.step()
        assert all(map(same_bits, before, shared.all)) == (step == 2)
        assert_same(shared, alone)


class Counting(optim.SGD):
    """Counts its steps in a Python attribute."""

    count = 0

    def step(self) -> None:
        self.count += 1
        before = self.get_lr()
        self.set_lr(before / self.count)
        super().step()
        self.set_lr(before)


@kept_ranks(2)
def test_what_cannot_have_a_journal_is_refused_on_every_rank(group: Any) -> None:
    def refused(words: str, model: Any, optimizer_class: Any = optim.AdamW, **options: Any) -> None:
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(ConfigError, match=f"(?s)journal.*{words}"):
            optimizer = ShardedOptimizer(
                model.parameters(), optimizer_class, group, learning_rate=0.1, journal=True, **options
            )
            for parameter in model.parameters():
                parameter.grad = paddle.ones_like(parameter)
            optimizer.step()
        assert all(map(same_bits, model.parameters(), before))

    def wrapped() -> Any:
        return DataParallel(nn.Linear(30, 20), group=group, share_parameters=True)

    refused("Lamb, which gets whole parameters", wrapped(), optim.Lamb)
    refused("Counting, which remembers more", wrapped(), Counting)
    refused("share_parameters=True", nn.Linear(30, 20))
    refused("share_parameters=True", nn.LayerList([wrapped(), nn.Linear(3, 2)]))
    with pytest.raises(ConfigError, match="journal"):
        ShardedOptimizer(nn.Linear(3, 2).parameters(), optim.SGD, group, journal="yes")


@ranks(4, group=None)
def test_several_hosts_are_refused(rank: int) -> None:
    place(rank, (0, 0, 1, 1))
    layer = nn.Linear(30, 20)
    model = DataParallel(layer, share_parameters=True)
    optimizer = ShardedOptimizer(model.parameters(), optim.SGD, learning_rate=0.1, journal=True)
    model(paddle.ones([2, 30])).sum().backward()
    with pytest.raises(ConfigError, match="4 ranks, of which this host has 2"):
        optimizer.step()


def test_one_rank_needs_no_journal() -> None:
    layer = nn.Linear(3, 2)
    with pytest.warns(RuntimeWarning, match="trains alone"):
        optimizer = ShardedOptimizer(layer.parameters(), optim.SGD, learning_rate=0.1, journal=True)
    layer(paddle.ones([2, 3])).sum().backward()
    optimizer.step()
    assert len(optimizer.optims) == 1
