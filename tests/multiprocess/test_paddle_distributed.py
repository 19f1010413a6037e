"""paceline.paddle between hosts: gradients, values and errors that go through paddle.distributed.

Each rank sets which of two hosts it is on: `_host_hint` decides which ranks can share memory. What also holds
on one host is in test_conformance, which runs over paddle.distributed as well.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn

import paceline.paddle
from paceline.errors import ConfigError, ModelMismatchError, PeerLostError, RendezvousError
from paceline.paddle import DataParallel, SyncBatchNorm
from paceline.paddle.communicator import form_group
from paceline.paddle.communicator.find_peers import connect_environment
from paceline.paddle.communicator.form_group import form_paddles_group, needs_paddles_group
from paceline.reducer import model_agreement
from tests.multiprocess.paddle_models import (
    KEEPS_EMPTY_GRADIENTS,
    Words,
    batch,
    join_paddle,
    joined_ranks,
    kept_ranks,
    ranks,
    share,
    squares,
    train,
    two_layers,
)
from tests.multiprocess.rank_signals import barrier, publish, wait_until_published
from tests.several_hosts import be_on_host

PATIENT_S = 60  # no rank waits for it if the error is reported at once
WORDS = (
    "RANK",
    "WORLD",
    "LOCAL",
    "PADDLE",
    "SLURM",
    "OMPI",
    "PMI",
    "MPI",
)  # prefixes of launchers' variables


class Everything(nn.Layer):
    """Parameters, statistics and buffers of many kinds, different on every rank before they are wrapped."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        paddle.seed(rank)
        self.norm = nn.BatchNorm1D(4)
        self.head = nn.Linear(4, 3)
        self.wide = nn.Linear(3, 2).to(dtype="float64")
        self.factor = self.create_parameter([3], dtype="bfloat16")
        self.nothing = self.create_parameter([0, 3], attr=paddle.ParamAttr(trainable=KEEPS_EMPTY_GRADIENTS))
        self.register_buffer("flag", paddle.full([3], bool(rank)))
        self.register_buffer("count", paddle.full([], rank, "int64"))
        self.register_buffer("turned", paddle.full([2, 3], float(rank)).t())
        self.register_buffer("part", paddle.full([9], float(rank))[3:7])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        hidden = self.head(self.norm(x)) * self.factor.astype("float32") + self.nothing.sum()
        return self.wide(hidden.astype("float64"))


def arrays(model: nn.Layer, what: str) -> list[np.ndarray]:
    """Return the gradients, or the values of parameters and buffers."""
    if what == "grad":
        tensors = [p.grad for p in model.parameters() if p.grad is not None]
    else:
        tensors = [*model.parameters(), *model.buffers()]
    return [tensor.astype("float64").numpy() for tensor in tensors]


def from_both(own: list[np.ndarray]) -> list[list[np.ndarray]]:
    found: list[list[np.ndarray]] = []
    dist.all_gather_object(found, own)
    return found


def assert_same_on_both(model: nn.Layer) -> None:
    for some, others in zip(*from_both(arrays(model, "value") + arrays(model, "grad")), strict=True):
        assert_array_equal(some, others)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, False),
        ({"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2"}, False),  # paddle.distributed.spawn
        ({"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2", "PADDLE_LOCAL_SIZE": "1"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}, True),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1"},
            False,
        ),
    ],
)
def test_a_launchers_variables_show_whether_there_are_several_hosts(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.split("_")[0] in WORDS]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert needs_paddles_group() == expected


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.1"])
@ranks(1, group=None)
def test_an_address_where_rank_0_cannot_listen_is_reported_at_once(rank: int, host: str) -> None:
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "PADDLE_MASTER": f"{host}:29500"}
    with pytest.raises(ConfigError, match=f"PADDLE_MASTER={host}"):
        connect_environment()


@ranks(1, group=None)
def test_an_address_where_another_process_listens_is_reported_at_once(rank: int) -> None:
    """Paddle's own store would end the process with a failed assertion."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = {"WORLD_SIZE": "2", "SLURM_STEP_NUM_NODES": "2"}
        os.environ |= place | {"PADDLE_MASTER": f"127.0.0.1:{other.getsockname()[1]}"}
        del os.environ["LOCAL_WORLD_SIZE"]
        with pytest.raises(RendezvousError, match=rf"(?s)could not open.*held by pid {os.getpid()}"):
            connect_environment()


def be_on_two_hosts(rank: int) -> None:
    be_on_host(rank)
    del os.environ["LOCAL_WORLD_SIZE"]
    os.environ |= {"SLURM_STEP_NUM_NODES": "2", "LOCAL_RANK": "0"}


@ranks(2, group=None)
def test_a_failed_start_may_be_repeated(rank: int) -> None:
    """Rank 0 serves the rendezvous address from its first try on, which ended before rank 1 connected."""
    be_on_two_hosts(rank)
    if rank == 0:
        with pytest.raises(RendezvousError, match="gave up waiting for rank 1 after"):
            form_paddles_group(0.5)
        publish("given up", 0)
    else:
        wait_until_published("given up", [0])
        with pytest.raises(RendezvousError):  # for the try that rank 0 gave up
            form_paddles_group(0.5)
    barrier("ready", rank)
    form_paddles_group(60.0)
    assert dist.get_world_size() == 2
    dist.destroy_process_group()
    with pytest.raises(ConfigError, match="once in a process"):
        form_paddles_group(60.0)


@ranks(2, group=None)
def test_a_rank_may_leave_as_soon_as_it_has_the_group(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has not used its connections yet when rank 0 leaves: Gloo would report a time-out to it."""
    be_on_two_hosts(rank)
    formed = dist.init_parallel_env
    started = time.monotonic()
    monkeypatch.setattr(dist, "init_parallel_env", lambda: (formed(), time.sleep(1.5 * rank)))
    form_paddles_group(60.0)
    assert time.monotonic() > started + 1.5
    dist.destroy_process_group()


@pytest.mark.parametrize("failing", [0, 1])
@ranks(2, group=None)
def test_a_group_that_one_rank_could_not_form_is_reported_to_all(
    rank: int, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on_two_hosts(rank)
    formed = dist.init_parallel_env

    def form() -> None:
        formed()
        barrier("formed", rank)
        if rank == failing:
            raise RuntimeError("no route")

    monkeypatch.setattr(dist, "init_parallel_env", form)
    if rank == failing:
        with pytest.raises(RuntimeError, match="no route"):
            form_paddles_group(60.0)
    else:
        with pytest.raises(RendezvousError, match=rf"(?s)another rank could not.*rank {failing}: no route"):
            form_paddles_group(60.0)
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match="once in a process"):
        form_paddles_group(60.0)


@ranks(2, group=None)
def test_a_rank_that_does_not_form_the_group_in_time_is_named_on_all(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on_two_hosts(rank)
    monkeypatch.setattr(form_group, "GLOO_LIMIT_S", 1.0)
    formed = dist.init_parallel_env

    def form() -> None:
        formed()
        if rank == 1:
            wait_until_published("given up", [0])

    monkeypatch.setattr(dist, "init_parallel_env", form)
    try:
        with pytest.raises(RendezvousError, match="another rank could not") as raised:
            form_paddles_group(5.0)
    finally:
        publish("given up", rank)
    assert "rank 1 has not formed Paddle's group" in raised.value.seen
    barrier("reported", rank)  # rank 0 keeps the membership store


@ranks(2, group=None)
def test_the_timeout_applies_to_connecting_and_not_to_forming_the_group(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank may connect just before the timeout, and all ranks form the group after it."""
    be_on_two_hosts(rank)
    formed = dist.init_parallel_env
    monkeypatch.setattr(dist, "init_parallel_env", lambda: (formed(), time.sleep(5.5 + rank)))
    form_paddles_group(5.0)
    dist.destroy_process_group()


@ranks(2, group=None)
def test_two_hosts_train_one_model(rank: int) -> None:
    be_on_host(rank)
    # RANK and the like are set, but none of Paddle's variables, nor the number of ranks per host: with it,
    # several hosts could not connect to 127.0.0.1.
    del os.environ["LOCAL_WORLD_SIZE"]
    os.environ |= {"SLURM_STEP_NUM_NODES": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    with pytest.raises(ConfigError, match="torchrun keeps a store"):
        paceline.paddle.init_parallel_env()
    del os.environ["TORCHELASTIC_RUN_ID"]
    rendezvous_address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    assert paceline.paddle.init_parallel_env() is None and dist.is_initialized()
    assert os.environ["PADDLE_MASTER"] == ":".join(rendezvous_address)
    own = share(batch(), rank)
    for view in (False, True):
        model = Everything(rank)
        wrapped = DataParallel(model, gradient_as_bucket_view=view, comm_buffer_size=0.0001)
        assert wrapped.gradient_path == "hosts"
        assert_same_on_both(model)
        alone = Everything(0)
        alone.set_state_dict(model.state_dict())
        squares(alone(own)).backward()
        for _ in range(3):
            wrapped.clear_gradients()
            squares(wrapped(own)).backward()
            assert_same_on_both(model)
        for found, *parts in zip(arrays(model, "grad"), *from_both(arrays(alone, "grad")), strict=True):
            assert_allclose(found, sum(parts) / 2, rtol=1e-2, atol=1e-6)  # one gradient is in bfloat16
        assert not model.flag.any() and int(model.count) == 0 and not model.part.any()
    with pytest.raises(ConfigError, match=r"(?s)reduce_through=\"memory\".*ranks on several hosts"):
        DataParallel(two_layers(), reduce_through="memory")
    with pytest.raises(ModelMismatchError, match="reduce_through"):
        DataParallel(two_layers(), reduce_through=("auto", "group")[rank])


@joined_ranks(2)
def test_sparse_rows_and_sync_batch_norm_between_hosts(rank: int) -> None:
    be_on_host(rank)
    join_paddle(rank)
    sparse, dense = Words(True), Words(False)
    words = paddle.to_tensor(([1, 3, 1], [3, 4, 5])[rank])
    for model in (sparse, dense):
        wrapped = DataParallel(model)
        optimizer = paddle.optimizer.SGD(0.5, parameters=model.parameters())
        for _ in range(2):
            squares(wrapped(words)).backward()
            optimizer.step()
            optimizer.clear_grad(set_to_zero=False)
    assert_allclose(sparse.table.weight.numpy(), dense.table.weight.numpy(), rtol=1e-5, atol=1e-6)
    model, alone = (
        nn.Sequential(two_layers(), nn.BatchNorm1D(2), nn.Linear(2, 2), nn.BatchNorm1D(2)) for _ in range(2)
    )
    x = batch()
    SyncBatchNorm.convert_sync_batchnorm(model)
    train(DataParallel(model), share(x, rank))
    assert model[1]._communicator.path == "group" and model[1]._communicator is model[3]._communicator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Paddle, about running statistics
        train(alone, paddle.to_tensor(x))
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)


@joined_ranks(3)
def test_a_group_of_some_ranks_is_between_hosts_too(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks have other numbers than in paddle.distributed's default group."""
    be_on_host(rank)
    monkeypatch.setattr(model_agreement, "_PATIENCE_S", PATIENT_S)
    join_paddle(rank)
    group = dist.new_group([1, 2])
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(ConfigError, match="not in the group"):
            DataParallel(two_layers(), group=group)
        assert time.monotonic() - started < PATIENT_S / 2  # no rank in the group waits for its answer
    else:
        model = two_layers()
        model[2].bias.set_value(paddle.full([2], float(rank)))
        wrapped = DataParallel(model, group=group)
        assert wrapped.gradient_path == "hosts"
        assert_array_equal(model[2].bias.numpy(), [1.0, 1.0])
        (wrapped(paddle.ones([1, 4])).sum() * rank).backward()
        assert_array_equal(model[2].bias.grad.numpy(), [1.5, 1.5])
    dist.barrier()  # rank 0 keeps the store


@ranks(2, group=None, dies={1: signal.SIGKILL})
def test_a_killed_rank_ends_the_others_backward(rank: int) -> None:
    join_paddle(rank)
    wrapped = DataParallel(two_layers(), reduce_through="group", timeout_s=20)
    wrapped(paddle.ones([1, 4])).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # In a bucket, or earlier: the reports of one host's ranks, which go through memory, detect it too.
    where = r"(2\.bias|the status of all ranks)"
    with pytest.raises(PeerLostError, match=rf"(?s)Rank 1 of 2 died.*{where}.*over Paddle's GLOO group"):
        wrapped(paddle.ones([1, 4])).sum().backward()


@kept_ranks(2)
def test_a_paceline_group_allows_only_the_memory_path(group: object) -> None:
    with pytest.raises(ConfigError, match="in host memory only"):
        DataParallel(two_layers(), group=group, reduce_through="group")
    with pytest.raises(ConfigError, match="reduce_through='wire' is not usable"):
        DataParallel(two_layers(), group=group, reduce_through="wire")
    assert DataParallel(two_layers(), group=group, reduce_through="memory").gradient_path == "memory"
