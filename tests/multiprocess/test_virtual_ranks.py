"""Training has the same bits on any number of processes, also if it is resumed on another number."""

from __future__ import annotations

import functools
import operator
import random
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.collectives.group import Group
from paceline.errors import ConfigError, SkippedPassError
from tests.harness import kept_ranks, needs_paddle, ranks, run_ranks
from tests.multiprocess.virtual_training import Run, adapter, by_hand, tree
from tests.several_hosts import be_on_host

STEPS = 7  # two epochs, and one step of the third
frameworks = pytest.mark.parametrize("framework", ["torch", pytest.param("paddle", marks=needs_paddle)])


def train(group: Group, framework: str, kind: str) -> str:
    return Run(framework, kind, group.rank, group.world_size, group).train(STEPS)


@functools.cache
def bits_by_hand(framework: str, kind: str) -> str:
    arguments = {"framework": framework, "kind": kind}
    (digest,) = run_ranks(do_by_hand, 1, arguments, framework=framework, kept=True)
    return digest


@frameworks
@pytest.mark.parametrize("kind", ["cnn", "averaged", "gpt", "views", "half", "half views", "words"])
def test_any_number_of_processes_has_the_bits_of_a_handwritten_loop_on_one(framework: str, kind: str) -> None:
    arguments = {"framework": framework, "kind": kind}
    expected = bits_by_hand(framework, {"views": "gpt", "half views": "half"}.get(kind, kind))
    for world_size in (1, 2, 3, 4):
        found = run_ranks(train, world_size, arguments, framework=framework, kept=True)
        assert found == [expected] * world_size, world_size


def train_over_hosts(rank: int, kind: str, hosts: tuple[int, ...]) -> str:
    be_on_host(hosts[rank])
    run = Run("torch", kind, rank, len(hosts), None)
    assert run.ddp.gradient_path == "hosts" and run.ddp.bits == "world"
    return run.train(STEPS)


@pytest.mark.parametrize(
    "kind, hosts",
    [
        ("averaged", (0, 0, 1, 1)),
        ("averaged", (0, 1, 2)),
        ("words", (0, 1, 0)),
        ("half", (0, 0, 0, 1)),
    ],
)
def test_several_hosts_have_those_bits_too(kind: str, hosts: tuple[int, ...]) -> None:
    found = run_ranks(train_over_hosts, len(hosts), {"kind": kind, "hosts": hosts}, group="gloo")
    assert found == [bits_by_hand("torch", kind)] * len(hosts)


def do_by_hand(_: Group, framework: str, kind: str, steps: int = STEPS) -> str:
    return by_hand(framework, kind, steps)


def train_a_part(group: Group, framework: str, kind: str, begin: int, end: int, folder: Path) -> str:
    do = adapter(framework)
    run = Run(framework, kind, group.rank, group.world_size, group)
    if begin:
        run.ddp.load_training_state(do.load(folder / f"{begin}"))
    digest = run.train(end - begin)
    if state := run.ddp.training_state():
        do.save(state, folder / f"{end}")
    return digest


def parts_of(steps: int, stops: int, seed: int) -> list[tuple[int, int, int]]:
    """Stop a training at random steps: return each part's number of processes, first and last step."""
    draw = random.Random(seed)
    ends = [*sorted(draw.sample(range(1, steps), stops)), steps]
    return [(draw.randint(1, 4), begin, end) for begin, end in zip([0, *ends], ends)]


def train_in_parts(
    framework: str, kind: str, parts: list[tuple[int, int, int]], deadline_s: float = 120.0
) -> set[str]:
    """Return the hashes with which the last part's processes end."""
    with tempfile.TemporaryDirectory() as folder:
        for processes, begin, end in parts:
            options = {"framework": framework, "kind": kind, "begin": begin, "end": end}
            options["folder"] = Path(folder)
            ended = run_ranks(train_a_part, processes, options, framework=framework, deadline_s=deadline_s)
    return set(ended)


@frameworks
def test_stopping_and_resuming_on_other_numbers_of_processes_keeps_the_bits(framework: str) -> None:
    ended = train_in_parts(framework, "averaged", parts_of(STEPS, 5, seed=0))
    undisturbed = run_ranks(train, 4, {"framework": framework, "kind": "averaged"}, framework=framework)
    assert ended == set(undisturbed)


def weighted(
    group: Group, weights: list[float], dtype: str, dense: Collection[int]
) -> tuple[float, float, list[float]]:
    """Return weighted gradients of a sum, in which micro-batch v is 0.1 + v: of weight, bias, and table.

    The gradient of the table is sparse, but for the micro-batches `dense`.
    """
    import torch

    from paceline.torch import DistributedDataParallel

    class Model(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1, dtype=getattr(torch, dtype))
            self.table = torch.nn.Embedding(3, 1, sparse=True, dtype=getattr(torch, dtype))

        def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
            if rank % 3 == 0:
                return self.bias.sum() * 2.5
            word = self.table.weight[rank % 2] if rank in dense else self.table(torch.tensor([rank % 2]))
            return (super().forward(x) + word * x).sum()

    model = Model()
    ddp = DistributedDataParallel(
        model, process_group=group, virtual_ranks=len(weights), find_unused_parameters=True
    )
    own = ddp._virtual.played
    for step in ddp.steps([torch.full((1, 1), 0.1 + rank, dtype=model.weight.dtype) for rank in own]):
        for batch, rank in zip(step, own):
            with ddp.weight(weights[rank]):
                ddp(batch, rank).backward()
    table = model.table.weight.grad
    assert table.is_sparse is not bool(dense)
    return float(model.weight.grad), float(model.bias.grad), table.to_dense().flatten().tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("weights, dense", [([3.0, 1.25, 0.0, 7.1, 2.0, 5.0], []), ([0.3, 4.0, 1.1], [1])])
def test_weights_and_parameters_that_some_micro_batches_do_not_use(
    weights: list[float], dense: list[int], dtype: str
) -> None:
    arguments = {"weights": weights, "dtype": dtype, "dense": dense}
    sizes = range(1, min(4, len(weights)) + 1)
    found = [run_ranks(weighted, world_size, arguments, kept=True) for world_size in sizes]
    weight, bias, table = found[0][0]
    assert all(each == (weight, bias, table) for run in found for each in run)

    def mean(gradients: np.ndarray, add: Callable[[Sequence[Any]], Any]) -> Any:
        leaves = gradients.astype(dtype).astype(np.float32) * np.array(weights, np.float32)
        return (add(leaves) / np.float32(sum(weights))).astype(dtype)

    numbers = np.arange(len(weights))
    batches = np.where(numbers % 3, numbers + 0.1, 0)
    assert weight == mean(batches, tree)
    assert bias == mean(np.where(numbers % 3, 1.0, 2.5), tree)
    in_order = functools.partial(functools.reduce, operator.add)
    assert table == [mean(np.where(numbers % 2 == row, batches, 0), in_order) for row in range(3)]


def check_equal(group: Group, digest: str) -> None:
    rows = group.all_gather(np.frombuffer(digest.encode(), np.uint8))
    assert (rows == rows[0]).all()


@ranks(2)
def test_a_loop_that_is_left_within_a_step_raises_on_every_rank(group: Group) -> None:
    run = Run("torch", "cnn", group.rank, 2, group)
    before = run.digest()
    if group.rank == 0:
        with pytest.raises(ConfigError, match="left before its last micro-batch"):
            for step in run.ddp.steps(run.loader, seed=3):
                for batch in step:
                    run.loss_of(run.ddp, batch).backward()
                    break
                assert all(parameter.grad is None for parameter in run.ddp.parameters())
    else:
        with pytest.raises(SkippedPassError):
            run.train(1)
    assert run.digest() == before
    check_equal(group, run.train(2))


@ranks(2)
def test_an_exception_within_a_step_is_reported_when_its_rank_continues(group: Group) -> None:
    run = Run("torch", "gpt", group.rank, 2, group)
    if group.rank == 0:
        with pytest.raises(ZeroDivisionError):
            for step in run.ddp.steps(run.loader, seed=3):
                for _ in step:
                    1 / 0  # noqa: B018
    else:
        with pytest.raises(SkippedPassError):
            run.train(1)
    check_equal(group, run.train(2))


@kept_ranks(2)
def test_wrong_steps_raise(group: Group) -> None:
    run = Run("torch", "cnn", group.rank, 2, group)
    with pytest.raises(ConfigError, match="no backward"):
        for step in run.ddp.steps(run.loader):
            for batch in step:
                run.ddp(batch)
    with pytest.raises(ConfigError, match="no whole number of steps"):
        run.ddp.steps([1, 2, 3])
    with pytest.raises(ConfigError, match=r"ended within a step, after 3 of 4"):
        for step in run.ddp.steps(iter([next(iter(run.loader))] * 3)):
            for batch in step:
                run.loss_of(run.ddp, batch).backward()
    with pytest.raises(ConfigError, match="another seed"):
        run.ddp.steps(run.loader, seed=1)
    with pytest.raises(ConfigError, match="outside of the micro-batches"):
        run.loss_of(run.ddp, next(iter(run.loader))).backward()
    run.sampler.virtual_ranks = 4
    with pytest.raises(ConfigError, match="other virtual ranks"):
        run.ddp.steps(run.loader)
    with pytest.raises(ConfigError, match="finish"):
        run.ddp.finish()


@kept_ranks(2)
def test_what_depends_on_the_number_of_processes_is_refused(group: Group) -> None:
    from torch import nn

    from paceline.torch import DistributedDataParallel, SyncBatchNorm

    def wrap(model: nn.Module, **options: Any) -> None:
        DistributedDataParallel(model, process_group=group, virtual_ranks=8, **options)

    with pytest.raises(ConfigError, match="SyncBatchNorm"):
        wrap(nn.Sequential(nn.Linear(2, 2), SyncBatchNorm(2)))
    with pytest.raises(ConfigError, match="max_norm"):
        wrap(nn.Embedding(4, 2, max_norm=1.0))
    for name, value in (
        ("reduce_through", "group"),
        ("static_graph", True),
        ("compress_between_hosts", "int8"),
        ("buffers", {"*": "local"}),
        ("broadcast_buffers", False),
    ):
        with pytest.raises(ConfigError, match=name):
            wrap(nn.Linear(2, 2), **{name: value})
    with pytest.raises(ConfigError, match=r"1 virtual ranks can't be played by 2"):
        DistributedDataParallel(nn.Linear(2, 2), process_group=group, virtual_ranks=1)
