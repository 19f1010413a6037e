"""A run that is stopped and resumed from its training state ends with the bits of the undisturbed run."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from paceline.collectives.group import Group
from paceline.errors import ConfigError, ModelMismatchError
from tests.harness import kept_ranks, run_ranks

STEPS = 12
STOPS = (0, 1, 7, 10)  # before the first step, within an epoch, between two epochs, within the second
frameworks = pytest.mark.parametrize("framework", ["torch", "paddle"])
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"sharded": True},
    "shared": {"sharded": True, "share_parameters": True},
}


def program(framework: str) -> ModuleType:
    return importlib.import_module(f"tests.multiprocess.resumed_{framework}")


def begin(framework: str, group: Group, **options: Any) -> Any:
    do = program(framework)
    do.seed(5)
    run = do.Run(group.world_size, group.rank, group, **options)
    do.seed(10 + group.rank)
    return run


def begin_elsewhere(framework: str, group: Group, **options: Any) -> Any:
    """Begin a run with other values and random numbers on all ranks."""
    do = program(framework)
    do.seed(100 + group.rank)
    return do.Run(group.world_size, group.rank, group, **options)


def stop(framework: str, group: Group, run: Any, path: Path) -> None:
    state = run.ddp.training_state()
    assert bool(state) == (group.rank == 0)
    if state:
        program(framework).save(state, path)
    group.barrier()


def check_resumed(framework: str, group: Group, folder: Path, **options: Any) -> None:
    do = program(framework)
    undisturbed = begin(framework, group, **options)
    losses = []
    for number in range(STEPS):
        if number in STOPS:
            stop(framework, group, undisturbed, folder / f"{number}")
        losses.append(undisturbed.step())
    for number in STOPS:
        resumed = begin_elsewhere(framework, group, **options)
        resumed.ddp.load_training_state(do.load(folder / f"{number}"))
        assert resumed.steps(STEPS - number) == losses[number:]
        assert resumed.digest() == undisturbed.digest()
        assert resumed.ddp.training_state(to=group.world_size - 1).get("good_backwards", STEPS) in (
            STEPS,
            0,  # with a single rank nothing is counted
        )


@frameworks
@pytest.mark.parametrize("kind", KINDS)
@kept_ranks(2, framework="framework")
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(
    group: Group, framework: str, kind: str, tmp_path: Path
) -> None:
    check_resumed(framework, group, tmp_path, **KINDS[kind])


@frameworks
@kept_ranks(1, framework="framework")
def test_a_resumed_run_of_one_rank(group: Group, framework: str, tmp_path: Path) -> None:
    check_resumed(framework, group, tmp_path)


@frameworks
@kept_ranks(2, framework="framework")
def test_a_resumed_run_with_local_statistics(group: Group, framework: str, tmp_path: Path) -> None:
    check_resumed(framework, group, tmp_path, buffers={program(framework).RUNNING_MEAN: "local"})


@kept_ranks(1)
def test_a_resumed_run_whose_loader_has_workers(group: Group, tmp_path: Path) -> None:
    do = program("torch")
    first = begin("torch", group, workers=1)
    losses = first.steps(3)
    stop("torch", group, first, tmp_path / "state")
    losses += first.steps(3)
    resumed = begin_elsewhere("torch", group, workers=1)
    resumed.ddp.load_training_state(do.load(tmp_path / "state"))
    assert resumed.steps(3) == losses[3:]
    assert resumed.digest() == first.digest()


def save_after_four_steps(group: Group, framework: str, path: Path) -> tuple[str, list[float]]:
    run = begin(framework, group, buffers={program(framework).RUNNING_MEAN: "local"})
    run.steps(4)
    stop(framework, group, run, path)
    return run.digest(), run.statistic().tolist()


def load_and_step(group: Group, framework: str, path: Path) -> tuple[str, list[float], list[str], Any]:
    run = begin_elsewhere(framework, group, buffers={program(framework).RUNNING_MEAN: "local"})
    with pytest.warns(RuntimeWarning) if group.rank == 0 else pytest.MonkeyPatch.context() as caught:
        run.ddp.load_training_state(program(framework).load(path))
    warned = [str(each.message) for each in caught] if group.rank == 0 else []
    assert run.sampler.state_dict()["position"] == 16
    run.step()
    return run.digest(), run.statistic().tolist(), warned, None


@frameworks
def test_another_number_of_ranks_continues_with_other_random_numbers(framework: str, tmp_path: Path) -> None:
    if framework == "paddle":
        pytest.importorskip("paddle")
    path = tmp_path / "state"
    saved = run_ranks(save_after_four_steps, 2, {"framework": framework, "path": path}, framework=framework)
    assert len(saved) == 2
    loaded = run_ranks(load_and_step, 1, {"framework": framework, "path": path}, framework=framework)
    (warned,) = loaded[0][2]
    assert "saved by 2 ranks" in warned and "loaded by 1" in warned and "other random numbers" in warned
    assert "mean" in warned  # rank 1's differed


class Counting:
    """An object that a user registers: it holds a number, or something that cannot be saved."""

    def __init__(self, held: object = 0) -> None:
        self.held = held

    def state_dict(self) -> dict[str, object]:
        return {"held": [self.held]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.held,) = state["held"]


@frameworks
@kept_ranks(2, framework="framework")
def test_a_state_of_something_else_is_refused_on_every_rank(group: Group, framework: str) -> None:
    saved = begin(framework, group)
    saved.steps(2)
    states = [saved.ddp.training_state(to=rank) for rank in range(2)]
    state = states[group.rank]
    assert not states[1 - group.rank]
    run = begin_elsewhere(framework, group)
    before = run.digest()
    with pytest.raises(ConfigError, match=r"no training state|Rank 0 of 2 could not load"):
        run.ddp.load_training_state({"weight": 1} if group.rank == 0 else state)
    with pytest.raises(ConfigError, match=r"no training state|Rank 1 of 2 could not load"):
        run.ddp.load_training_state({} if group.rank == 1 else state)
    with pytest.raises(ConfigError, match="format 99"):
        run.ddp.load_training_state({**state, "format": 99})
    wider = begin_elsewhere(framework, group, width=17)
    with pytest.raises(ConfigError, match=r"another model(.|\n)*0.weight"):
        wider.ddp.load_training_state(state)
    run.ddp.register_state("counter", Counting())
    with pytest.raises(ConfigError, match="registered, and not in the state: counter"):
        run.ddp.load_training_state(state)
    objects = {name: each for name, each in state["objects"].items() if name != "sampler"}
    with pytest.raises(ConfigError, match="counter"):
        run.ddp.load_training_state({**state, "objects": objects | {"ema": {}}})
    assert run.digest() == before
    bare = begin_elsewhere(framework, group)
    with pytest.raises(ConfigError, match=r"in the state, and not registered: ema(.|\n)*register_state..ema"):
        bare.ddp.load_training_state({**state, "objects": state["objects"] | {"ema": {}}})
    with pytest.raises(ConfigError, match=r"'sampler' does not take|DistributedBatchSampler"):
        bare.ddp.load_training_state({**state, "objects": state["objects"] | {"sampler": {"version": 1}}})


@frameworks
@kept_ranks(2, framework="framework")
def test_all_ranks_must_register_the_same_objects_and_they_must_be_savable(
    group: Group, framework: str
) -> None:
    ddp = begin(framework, group).ddp
    counter = Counting(np.float64(0.1))
    ddp.register_state("counter", counter)
    ddp.register_state("counter", counter)  # registering it again changes nothing
    state = ddp.training_state()
    if state:
        assert state["objects"]["counter"] == {"held": [0.1]}
    with pytest.raises(ConfigError, match="a name that no other object has"):
        ddp.register_state("counter", Counting())
    with pytest.raises(ConfigError, match="an object with state_dict"):
        ddp.register_state("model", object())
    if group.rank == 1:
        counter.held = object()
    with pytest.raises(ConfigError, match=r"'counter' can't be saved|save the training state"):
        ddp.training_state()
    counter.held = 1
    if group.rank == 1:
        ddp.register_state("another", Counting())
    with pytest.raises(ModelMismatchError, match="registered"):
        ddp.training_state()


@frameworks
@kept_ranks(2, framework="framework")
def test_options_that_belong_to_a_layout_of_ranks_are_refused_by_name(group: Group, framework: str) -> None:
    module = importlib.import_module(f"paceline.{framework}")
    ddp = begin(framework, group, local_sgd=module.LocalSGD(every=2, between="ranks")).ddp
    with pytest.raises(ConfigError, match=r"local_sgd(.|\n)*sync_parameters"):
        ddp.training_state()


@kept_ranks(2, group="gloo")
def test_residuals_of_a_hook_are_refused(rank: int) -> None:
    from torch import nn

    from paceline.torch import DistributedDataParallel, compression

    for keeps in (True, False):
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        hook = compression.Fp16Compression(error_feedback=keeps)
        ddp.register_comm_hook(hook, compression.fp16_hook)
        if keeps:
            with pytest.raises(ConfigError, match=r"Fp16Compression(.|\n)*error_feedback=False"):
                ddp.training_state()
        else:
            assert bool(ddp.training_state()) == (rank == 0)
