"""`paceline.paddle.DataParallel(layers, share_parameters=True)`: one copy of the parameters on a host."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle import optimizer as optim
from paddle.utils import unique_name

from paceline.errors import (
    ConfigError,
    ModelMismatchError,
    PeerLostError,
    ReplicaError,
    ReplicasDifferError,
)
from paceline.paddle import DataParallel, LocalSGD, ShardedOptimizer
from paceline.paddle import share as ours_share
from tests.multiprocess.paddle_models import (
    batch,
    join_paddle,
    joined_ranks,
    kept_ranks,
    ranks,
    share,
    squares,
    two_layers,
)
from tests.multiprocess.test_paddle_hosts import BLOCKS, place


def make_model() -> nn.Layer:
    with unique_name.guard():
        return two_layers(width=300)


def wrap(group: Any, **options: Any) -> DataParallel:
    return DataParallel(make_model(), group=group, **{"share_parameters": True, **options})


def values(model: nn.Layer) -> list[np.ndarray]:
    return [parameter.numpy() for parameter in model.parameters()]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, one, other))


def backward(model: DataParallel, step: int, rank: int) -> None:
    squares(model(share(batch(8, seed=step), rank))).backward()


def file_at(address: int) -> str:
    """Return the permissions, device and inode of the mapping at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, device, inode, *_ = line.split()
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= address < end:
            return f"{permissions} {device} {inode}"
    raise AssertionError("nothing is mapped there")


def trained(group: Any, how: str, rank: int, **options: Any) -> list[np.ndarray]:
    """Train for sixty steps of AdamW: unshared, or shared and plain, sharded, or sharded before wrapping."""
    model = make_model()
    arguments = {"learning_rate": 0.01, "grad_clip": nn.ClipGradByGlobalNorm(0.1)}

    def make() -> Any:
        if how.startswith("sharded"):
            return ShardedOptimizer(model.parameters(), optim.AdamW, group, **arguments)
        return optim.AdamW(parameters=model.parameters(), **arguments)

    before = make() if how == "sharded before" else None
    wrapped = DataParallel(model, group=group, share_parameters=how != "unshared", **options)
    optimizer = before or make()
    for step in range(60):
        backward(wrapped, step, rank)
        if how == "plain":
            with wrapped.writing():
                optimizer.step()
        else:
            optimizer.step()
        optimizer.clear_grad()
    return values(model)


@kept_ranks(2)
def test_the_bits_are_those_of_replicas(group: Any) -> None:
    expected = trained(group, "unshared", group.rank)
    for how in ("plain", "sharded", "sharded before"):
        assert same(trained(group, how, group.rank), expected), how
    assert same(trained(group, "sharded", group.rank, gradient_as_bucket_view=True), expected)


@joined_ranks(2)
def test_over_paddles_process_group(rank: int) -> None:
    join_paddle(rank)
    expected = trained(None, "unshared", rank)
    assert same(trained(None, "sharded", rank), expected)
    assert same(trained(None, "sharded", rank, reduce_through="group"), expected)


CHANGES: dict[str, Callable[[nn.Layer], object]] = {
    "scale_": lambda model: model[0].weight.scale_(2.0),
    "clip_": lambda model: model[0].weight.clip_(-0.01, 0.01),
    "set_value": lambda model: model[2].bias.set_value(np.full([2], 3, np.float32)),
    "assign": lambda model: paddle.assign(paddle.ones([300, 2]), model[2].weight),
    "indexing": lambda model: model[0].weight.__setitem__(0, 5.0),
    "set_state_dict": lambda model: model.set_state_dict(
        {name: value + 1 for name, value in model.state_dict().items()}
    ),
    "fill_": lambda model: model[0].bias.fill_(7.0),
}


@kept_ranks(2)
def test_stray_write_is_an_error_at_its_line_and_undone(group: Any) -> None:
    wrapped = wrap(group)
    model, before = wrapped.module, values(wrapped)
    files = group.all_gather(np.frombuffer(file_at(model[0].weight.data_ptr()).ljust(64).encode(), np.uint8))
    assert bytes(files[0]) == bytes(files[1]) and bytes(files[0]).startswith(b"r--s")
    for name, change in CHANGES.items():
        with pytest.raises(ConfigError, match=r"This process wrote to '\d\.\w+'"), paddle.no_grad():
            change(model)
            paddle.zeros([1])  # raises here at the latest
        assert same(values(wrapped), before), name
    # On all ranks, with the right values: no rank has used a written value.
    backward(wrapped, 0, group.rank)
    for name, change in CHANGES.items():
        with wrapped.writing(), paddle.no_grad():
            change(model)
        assert not same(values(wrapped), before), name
        before = values(wrapped)
    by_rank = group.all_gather(np.concatenate([each.ravel() for each in before]))
    assert np.array_equal(*by_rank)


@kept_ranks(2)
def test_a_plain_optimizer_is_refused_before_it_has_changed_anything(group: Any) -> None:
    model = make_model()
    plain = optim.Adam(0.1, parameters=model.parameters())
    grouped = optim.Momentum(0.1, parameters=[{"params": model.parameters()}])
    wrapped = DataParallel(model, group=group, share_parameters=True)
    backward(wrapped, 0, group.rank)
    before = values(model)
    for optimizer in (plain, grouped):
        with pytest.raises(ConfigError, match=r"step: its parameters are shared by 2 ranks"):
            optimizer.step()
        assert not optimizer.state_dict()
    assert same(values(model), before)
    with wrapped.writing():
        plain.step()
    assert not same(values(model), before)


@kept_ranks(2)
def test_writes_count_for_all_ranks_or_for_none(group: Any) -> None:
    wrapped = wrap(group)
    before = values(wrapped)
    with wrapped.writing(), paddle.no_grad():
        if group.rank == 1:
            wrapped.module[0].weight.fill_(3.0)
        seen = wrapped.module[0].weight.numpy()
    assert np.array_equal(seen, before[0]) == (group.rank == 0)  # other ranks' writes show only after it
    assert bool((wrapped.module[0].weight == 3).all())

    before = values(wrapped)
    with (
        pytest.raises(ReplicasDifferError, match="have not written the same") as differ,
        wrapped.writing(),
        paddle.no_grad(),
    ):
        wrapped.module[2].bias.fill_(float(group.rank))
        wrapped.module[0].bias.fill_(5.0)
    assert differ.value.differing == {"2.bias": (1,)}
    expected = ReplicaError if group.rank == 0 else ZeroDivisionError
    with pytest.raises(expected), wrapped.writing(), paddle.no_grad():
        wrapped.module[0].weight.fill_(4.0)
        if group.rank == 1:
            raise ZeroDivisionError("no data")
    assert same(values(wrapped), before)

    wrapped.set_state_dict({name: value + 1 for name, value in wrapped.state_dict().items()})
    assert same(values(wrapped), [value + 1 for value in before])

    loss = squares(wrapped(share(batch(8), group.rank)))
    with wrapped.writing(), paddle.no_grad():
        if group.rank == 1:
            wrapped.module[2].weight.scale_(2.0)
    with pytest.raises(Exception, match=r"(?i)inplace"):  # also on the rank that has not written
        loss.backward()


@kept_ranks(2)
def test_writing_within_a_backward_is_refused(group: Any) -> None:
    wrapped = wrap(group)

    def write(_: paddle.Tensor) -> None:
        with pytest.raises(ConfigError, match="a backward is running"), wrapped.writing():
            pass

    loss = wrapped(share(batch(8), group.rank))
    loss.register_hook(write)
    squares(loss).backward()


class Odd(nn.Layer):
    """Parameters that are tied, frozen, empty, of other dtypes, not synchronised, or change in forward."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(3)
        self.norm = nn.BatchNorm1D(4)
        self.table = nn.Embedding(6, 4)
        self.tied = self.table.weight
        self.head = nn.Linear(4, 2)
        self.wide = self.create_parameter([3], dtype="float64")
        self.wide.stop_gradient = True
        self.empty = self.create_parameter([1, 4])
        self.alone = self.create_parameter([4])
        self.alone.no_sync = True
        self.scalar = self.create_parameter([])

    def forward(self, words: paddle.Tensor) -> paddle.Tensor:
        found = self.norm(self.table(words) + paddle.matmul(self.table(words), self.tied.t()).mean())
        return self.head(found + self.alone + self.empty * self.scalar) * float(self.wide.sum())


@kept_ranks(2)
def test_parameters_of_all_kinds(group: Any) -> None:
    words = paddle.to_tensor([[0, 1, 5], [2, 3, 4]][group.rank])
    results = []
    for is_shared in (False, True):
        with unique_name.guard():
            model = Odd()
        wrapped = DataParallel(model, group=group, share_parameters=is_shared)
        optimizer = ShardedOptimizer(model.parameters(), optim.Adam, group, learning_rate=0.1)
        for _ in range(5):
            squares(wrapped(words)).backward()
            optimizer.step()
            optimizer.clear_grad()
        wrapped.eval()
        wrapped(words)
        results.append(values(wrapped))
        is_read_only = {
            name: file_at(parameter.data_ptr()).startswith("r--s")
            for name, parameter in model.named_parameters()
        }
        private = {name for name, is_so in is_read_only.items() if not is_so}
        assert not is_shared or private == {"norm._mean", "norm._variance", "alone"}
    assert same(*results)


@kept_ranks(2)
def test_copies_moves_and_wrapping_again(group: Any) -> None:
    wrapped = wrap(group)
    model, before = wrapped.module, values(wrapped)
    twin = copy.deepcopy(model)
    with paddle.no_grad():
        twin[0].weight.zero_()
    optim.SGD(1.0, parameters=twin.parameters()).step()
    assert same(values(wrapped), before)

    again = DataParallel(model, group=group)  # each rank has its own copy again
    assert file_at(model[0].weight.data_ptr()).startswith("rw-p")
    with paddle.no_grad():
        model[0].weight.add_(paddle.full([], float(group.rank)))
    assert np.array_equal(model[0].weight.numpy(), before[0] + group.rank)
    del again
    with pytest.raises(ReplicasDifferError):
        DataParallel(model, group=group, init_sync=False, share_parameters=True)

    shared = DataParallel(model, group=group, share_parameters=True)
    model.to(dtype="float64")
    with pytest.raises(ConfigError, match="moved out of the shared memory") as moved:
        shared(share(batch(8).astype("float64"), group.rank))
    assert moved.value.parameter == "0.weight"


@kept_ranks(2)
def test_what_cannot_be_shared_is_refused_on_every_rank(group: Any) -> None:
    with pytest.raises(ConfigError, match="local_sgd"):
        wrap(group, local_sgd=LocalSGD(every=2))
    with pytest.raises(ConfigError, match="share_parameters"):
        wrap(group, share_parameters="yes")
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=1.0 if group.rank else None), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="rank 1: the embedding '0' has a max_norm"):
        DataParallel(model, group=group, share_parameters=True)
    overlapping = make_model()
    overlapping[2].bias.get_tensor()._share_data_with(overlapping[0].bias.detach()[1:3].get_tensor())
    with pytest.raises(ConfigError, match=r"'0\.bias' and '2\.bias' are different parameters"):
        DataParallel(overlapping, group=group, share_parameters=True)

    wrapped = wrap(group)
    with pytest.raises(ConfigError, match="all ranks of a host step together"):
        wrapped.join()
    optimizer = ShardedOptimizer(wrapped.parameters(), optim.SGD, group)
    backward(wrapped, 0, group.rank)
    with wrapped.writing(), pytest.raises(ConfigError, match=r"within writing\(\)"):
        optimizer.step()
    optimizer.step()


@kept_ranks(2)
def test_ranks_with_different_numbers_of_batches(group: Any) -> None:
    results = []
    for is_shared in (False, True):
        wrapped = wrap(group, share_parameters=is_shared)
        optimizer = ShardedOptimizer(wrapped.parameters(), optim.AdamW, group, learning_rate=0.01)

        def step(optimizer: ShardedOptimizer = optimizer) -> None:
            optimizer.step()
            optimizer.clear_grad()

        for number in wrapped.iterate(range(3 - group.rank), step):
            backward(wrapped, number, group.rank)
            step()
        results.append(values(wrapped))
    assert same(*results)
    by_rank = group.all_gather(np.concatenate([each.ravel() for each in results[1]]))
    assert np.array_equal(*by_rank)


@ranks(2, dies={1: signal.SIGKILL})
def test_parameters_survive_a_killed_rank(group: Any) -> None:
    wrapped = wrap(group)
    optimizer = ShardedOptimizer(wrapped.parameters(), optim.SGD, group)
    backward(wrapped, 0, group.rank)
    before = values(wrapped)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="nothing was written yet"):
        optimizer.step()
    assert same(values(wrapped), before)


@kept_ranks(2)
def test_share_for_inference(group: Any) -> None:
    paddle.seed(group.rank)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1D(4))
    model[1]._mean.set_value(np.full([4], 1.0 + group.rank, np.float32))
    x = paddle.to_tensor(batch(5, 6))
    given = copy.deepcopy(model)
    given.eval()
    assert ours_share(model, group) is model
    model.eval()
    outputs = group.all_gather(model(x).numpy())
    assert np.array_equal(*outputs)
    if group.rank == 0:
        assert np.array_equal(model(x).numpy(), given(x).numpy())
    held = [*model.parameters(), *model.buffers()]
    assert len(held) == 6 and all(file_at(each.data_ptr()).startswith("r--s") for each in held)

    model.train()
    with pytest.raises(ConfigError, match="a model of share"), paddle.no_grad():
        model(x)  # changes the running statistics
        paddle.zeros([1])
    squares(given(x)).backward()
    with pytest.raises(ConfigError, match="share to read"):
        ShardedOptimizer(model.parameters(), optim.SGD, group)
    model.eval()
    squares(model(x)).backward()
    with pytest.raises(ConfigError, match="several processes share to read"):
        optim.SGD(0.1, parameters=model.parameters()).step()
    with pytest.raises(ModelMismatchError):
        ours_share(nn.Linear(2, 2 + group.rank), group)
    with pytest.raises(ConfigError, match=r"an instance of paddle\.nn\.Layer"):
        ours_share([model], group)


@ranks(4, group=None)
def test_each_host_has_a_copy(rank: int) -> None:
    place(rank, BLOCKS)
    results = []
    for is_shared in (True, False):
        wrapped = wrap(None, share_parameters=is_shared)
        optimizer = ShardedOptimizer(wrapped.parameters(), optim.AdamW, learning_rate=0.01)
        for step in range(5):
            squares(wrapped(share(batch(8, seed=step), rank, 4))).backward()
            optimizer.step()
            optimizer.clear_grad()
        results.append((wrapped, values(wrapped)))
    wrapped, before = results[0]
    assert wrapped.gradient_path == "hosts" and same(before, results[1][1])
    exchange = wrapped._peers.exchange
    files = exchange.all_gather(file_at(wrapped.module[0].weight.data_ptr()).encode(), 60.0)
    assert files[0] == files[1] != files[2] == files[3]
    words = "Some hosts have written within"
    with pytest.raises(ReplicasDifferError, match=words), wrapped.writing(), paddle.no_grad():
        if rank == 0:
            wrapped.module[0].weight.fill_(3.0)
    assert same(values(wrapped), before)
    with wrapped.writing(), paddle.no_grad():
        if rank % 2:
            wrapped.module[0].weight.fill_(3.0)
    assert bool((wrapped.module[0].weight == 3).all())
    wrapped.check_replicas()
    with pytest.raises(ConfigError, match="on several hosts"):
        ours_share(nn.Linear(2, 2))
