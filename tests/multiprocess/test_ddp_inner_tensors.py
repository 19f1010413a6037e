"""Parameters and buffers that consist of other tensors: DDP handles the inner tensors or refuses by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.testing import assert_close

from paceline.errors import ConfigError, ModelMismatchError, ReplicasDifferError
from paceline.torch import DistributedDataParallel, LocalSGD, ShardedOptimizer, plan_memory, share
from tests.harness import kept_ranks
from tests.multiprocess.torch_groups import torch_group
from tests.tensor_subclasses import Forwarding, Opaque, Quantised

PATHS = pytest.mark.parametrize("path", ["memory", "group"])
ROWS = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


class Lora(nn.Module):
    """A frozen quantised base and a trained parameter."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        if isinstance(base, nn.Parameter):
            self.base = base
        else:
            self.register_buffer("base", base)
        self.a = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.base.dequantize().T + x @ self.a.T


def frozen(seed: int) -> nn.Parameter:
    return nn.Parameter(Quantised.make(seed), requires_grad=False)


def step(model: nn.Module, rank: int, world_size: int = 2) -> None:
    model(ROWS[rank * (8 // world_size) : (rank + 1) * (8 // world_size)]).square().mean().backward()


@pytest.mark.parametrize("as_buffer", [False, True])
@PATHS
@kept_ranks(2, group="gloo")
def test_a_parameter_trains_beside_a_quantised_base(rank: int, path: str, as_buffer: bool) -> None:
    base = Quantised.make(rank) if as_buffer else frozen(rank)
    ddp = DistributedDataParallel(Lora(base), reduce_through=path, check_replicas_every=1)
    alone = Lora(frozen(0))
    step(alone, 0, 1)
    for _ in range(2):
        ddp.zero_grad()
        step(ddp, rank)
        assert_close(ddp.module.a.grad, alone.a.grad, rtol=1e-4, atol=1e-5)
    for inner in ("data_", "scale_"):  # equal to those of rank 0
        assert torch.equal(getattr(ddp.module.base, inner), getattr(alone.base, inner))
    ddp.sync_buffers()


@PATHS
@kept_ranks(2, group="gloo")
def test_a_check_of_replicas_compares_inner_tensors(rank: int, path: str) -> None:
    options: dict[str, Any] = {"init_sync": False, "check_replicas_every": 1, "reduce_through": path}
    ddp = DistributedDataParallel(Lora(frozen(0)), **options)
    step(ddp, rank)
    if rank == 1:
        ddp.module.base.scale_[2] += 1
    with pytest.raises(ReplicasDifferError, match=r"'base\.scale_'"):
        step(ddp, rank)


class Trained(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor], torch.Tensor], seed: int = 0) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(3, 3, generator=made))
        self.middle = nn.Parameter(wrap(torch.randn(4, 3, generator=made)))
        self.last = nn.Parameter(torch.randn(4, generator=made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = (x @ self.first) @ self.middle.T + self.last
        return found.inner if isinstance(found, Forwarding) else found


class Unwrap(torch.autograd.Function):
    """Returns the inner tensor; its gradient is a plain tensor or, with `rewraps`, a wrapper."""

    @staticmethod
    def forward(ctx: Any, x: Any, rewraps: bool) -> torch.Tensor:
        ctx.rewraps = rewraps
        return x.inner.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None]:
        return (Forwarding(gradient) if ctx.rewraps else gradient), None


class Unwrapping(Trained):
    rewraps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self.middle
        if isinstance(middle, Forwarding):
            middle = Unwrap.apply(middle, self.rewraps)
        return (x @ self.first) @ middle.T + self.last


class Rewrapping(Unwrapping):
    rewraps = True


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, Forwarding) else tensor


def trained_alone(kind: type[Trained], steps: int, lr: float = 0.1) -> list[torch.Tensor]:
    model = kind(lambda tensor: tensor).double()
    optimizer = optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(ROWS.double()).square().mean().backward()
        optimizer.step()
    return [parameter.detach().float() for parameter in model.parameters()]


TRAINED = pytest.mark.parametrize("kind", [Unwrapping, Rewrapping])
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_as_bucket_view": True},
    {"init_sync": False, "check_replicas_every": 1},
    {"batched_grad_copy": True},
    {"static_graph": True, "bucket_cap_mb_list": [1e-4, 1e-5]},
)


@TRAINED
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@PATHS
@kept_ranks(2, group="gloo")
def test_a_trained_subclass(rank: int, path: str, options: dict[str, Any], kind: type[Trained]) -> None:
    model = kind(Forwarding, 0 if "init_sync" in options else rank)
    ddp = DistributedDataParallel(model, reduce_through=path, **options)
    optimizer = optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(ROWS[4 * rank : 4 * rank + 2]).square().mean().mul(0.5).backward()
        ddp(ROWS[4 * rank + 2 : 4 * rank + 4]).square().mean().mul(0.5).backward()
        optimizer.step()
    for ours, expected in zip(model.parameters(), trained_alone(kind, 3), strict=True):
        assert_close(plain(ours.detach()), expected)


@TRAINED
@kept_ranks(2, group="gloo")
def test_a_sharded_optimizer_of_a_trained_subclass(rank: int, kind: type[Trained]) -> None:
    model = kind(Forwarding)
    ddp = DistributedDataParallel(model)
    optimizer = ShardedOptimizer(model.named_parameters(), optim.SGD, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        step(ddp, rank)
        optimizer.step()
    for ours, expected in zip(model.parameters(), trained_alone(kind, 3), strict=True):
        assert_close(plain(ours.detach()), expected)


@kept_ranks(2, group="gloo")
def test_a_sharded_optimizer_beside_a_quantised_base(rank: int) -> None:
    model, alone = Lora(frozen(rank)), Lora(frozen(0))
    ddp = DistributedDataParallel(model)
    optimizer = ShardedOptimizer(model.parameters(), optim.Adam, lr=0.1)
    theirs = optim.Adam([alone.a], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        theirs.zero_grad()
        step(ddp, rank)
        step(alone, 0, 1)
        optimizer.step()
        theirs.step()
    assert_close(model.a, alone.a, rtol=1e-3, atol=1e-4)


@kept_ranks(2, group="gloo")
def test_local_sgd_of_a_trained_subclass(rank: int) -> None:
    models = [Unwrapping(Forwarding), Unwrapping(lambda tensor: tensor)]
    for model in models:
        ddp = DistributedDataParallel(model, local_sgd=LocalSGD(every=2, between="ranks"))
        optimizer = optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            step(ddp, rank)
            optimizer.step()
    for ours, expected in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(plain(ours.detach()), expected)


@pytest.mark.parametrize("takes", ["share_parameters", "share"])
@kept_ranks(2, group="gloo")
def test_sharing_refuses_a_quantised_base_by_name(rank: int, takes: str) -> None:
    with pytest.raises(ConfigError, match=r"'base'.*Quantised"):
        if takes == "share":
            share(Lora(frozen(0)))
        else:
            DistributedDataParallel(Lora(frozen(0)), share_parameters=True)


def per_channel(value: float) -> torch.Tensor:
    scales, points = torch.tensor([0.1, 0.2]) * value, torch.tensor([0, 1])
    return torch.quantize_per_channel(torch.ones(2, 3), scales, points, 0, torch.qint8)


def jagged(value: float) -> torch.Tensor:
    rows = [torch.full((2,), value), torch.full((3,), value)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


BUFFERS: dict[str, Callable[[float], torch.Tensor]] = {
    "jagged": jagged,
    "nested": lambda value: torch.nested.nested_tensor([torch.full((2,), value), torch.full((3,), value)]),
    "coo": lambda value: (torch.eye(3) * value).to_sparse(),
    "csr": lambda value: (torch.eye(3) * value).to_sparse_csr(),
    "csc": lambda value: (torch.eye(3) * value).to_sparse_csc(),
    "bsr": lambda value: (torch.eye(4) * value).to_sparse_bsr((2, 2)),
    "per_tensor": lambda value: torch.quantize_per_tensor(torch.full((3,), value), 0.1, 0, torch.quint8),
    "per_channel": per_channel,
    "expanded": lambda value: torch.full((2, 1, 1), value).expand(2, 3, 2),
    "windows": lambda value: (torch.arange(6.0) * value).unfold(0, 3, 1),
    "steps": lambda value: (torch.arange(6.0) * value)[::2],
    "quantised": lambda value: Quantised.make(int(value)),
    "forwarding": lambda value: Forwarding(torch.full((3,), value)),
    "opaque_bits": lambda value: torch.full((3,), value).to(torch.float8_e5m2),
}


def values_of(tensor: Any) -> list[torch.Tensor]:
    if isinstance(tensor, Quantised):
        return [tensor.data_, tensor.scale_]
    if tensor.is_quantized:
        return [tensor.dequantize()]
    if tensor.is_nested:
        return [tensor.values(), tensor.offsets()] if tensor.layout is torch.jagged else list(tensor.unbind())
    if tensor.layout is not torch.strided:
        return [tensor.to_dense()]
    return [plain(tensor)]


def assert_same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    for one, other in zip(values_of(ours), values_of(expected), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore")  # torch warns about prototype tensor kinds
@PATHS
@kept_ranks(2, group="gloo")
def test_buffers_of_every_kind_are_rank_0s(rank: int, path: str) -> None:
    model = nn.Linear(3, 2)
    for name, make in BUFFERS.items():
        model.register_buffer(name, make(1.0 + rank))
    ddp = DistributedDataParallel(model, reduce_through=path, check_replicas_every=1)
    for name, make in BUFFERS.items():
        assert_same(getattr(model, name), make(1.0))
    loss = ddp(ROWS).sum()
    for name, make in BUFFERS.items():
        setattr(model, name, make(3.0 + rank))
    loss.backward()
    ddp.sync_buffers()
    for name, make in BUFFERS.items():
        assert_same(getattr(model, name), make(3.0))


@PATHS
@kept_ranks(2, group="gloo")
def test_an_expanded_buffer_is_averaged(rank: int, path: str) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("mask", torch.full((2, 1), 1.0 + rank).expand(2, 3))
    ddp = DistributedDataParallel(
        model, reduce_through=path, buffers={"mask": "average"}, init_sync_buffers=False
    )
    ddp(ROWS).sum().backward()
    assert torch.equal(model.mask, torch.full((2, 3), 1.5))


def masked() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "opaque": (lambda: Opaque(torch.ones(2, 2, dtype=torch.int8), torch.ones(2)), "'held'.*no memory"),
    "masked": (masked, "'held'.*no memory"),
    "on meta": (
        lambda: Quantised(torch.ones(2, 2, dtype=torch.int8, device="meta"), torch.ones(2)),
        r"'held\.data_'.*meta",
    ),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "'held'.*_mkldnn"),
    "zeros": (lambda: torch._efficientzerotensor((3,)), "'held'.*no memory"),
    "gaps": (lambda: torch.ones(40).as_strided((3, 2), (4, 8)), "'held'.*share places"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("only_rank", [None, 1])
@pytest.mark.parametrize("kind", REFUSED)
@kept_ranks(2, group="gloo")
def test_tensors_without_memory_are_refused_by_name_on_every_rank(
    rank: int, kind: str, only_rank: int | None
) -> None:
    make, pattern = REFUSED[kind]
    model = nn.Linear(3, 2)
    model.register_buffer("held", torch.ones(3) if only_rank not in (None, rank) else make())
    with pytest.raises(ConfigError) as caught:
        DistributedDataParallel(model)
    assert "'held" in str(caught.value)
    if only_rank is None:
        assert caught.match(pattern)


@pytest.mark.filterwarnings("ignore")
@kept_ranks(2, group="gloo")
def test_another_quantisation_on_a_rank_is_refused_by_name(rank: int) -> None:
    held = torch.quantize_per_tensor(torch.ones(3), 0.1 * (1 + rank), 0, torch.quint8)
    model = nn.Linear(3, 2)
    model.register_buffer("held", held)
    with pytest.raises(ModelMismatchError, match=r"'held\.int_repr'"):
        DistributedDataParallel(model)


TRAINED_REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: Quantised.make(0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TRAINED_REFUSED)
@kept_ranks(2, group="gloo")
def test_tensors_that_cannot_be_trained_are_refused_by_name(rank: int, kind: str) -> None:
    model = nn.Linear(3, 2)
    model.held = nn.Parameter(TRAINED_REFUSED[kind]())
    with pytest.raises(ConfigError, match="can't average gradients of 'held'"):
        DistributedDataParallel(model)


@kept_ranks(2, group="gloo")
def test_a_buffer_without_a_mean_is_not_averaged(rank: int) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("held", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match="buffer 'held' can't be averaged"):
        DistributedDataParallel(model, buffers={"*": "average"})


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.9 and older have none")
@pytest.mark.parametrize("when", ["before", "after"])
@PATHS
@kept_ranks(2, group="gloo")
def test_gradients_of_another_dtype_than_the_parameter_name_the_cause(
    rank: int, path: str, when: str
) -> None:
    model = nn.Linear(3, 2).bfloat16()
    with pytest.raises(ConfigError, match=r"(?s)'weight'.*grad_dtype = torch\.float32") as caught:
        if when == "before":
            model.weight.grad_dtype = torch.float32
        ddp = DistributedDataParallel(model, reduce_through=path)
        model.weight.grad_dtype = torch.float32
        ddp(ROWS.bfloat16()).sum().backward()
    assert ".half()" not in str(caught.value)


@kept_ranks(2, group="gloo")
def test_a_gradient_that_is_a_subclass_of_a_plain_parameter(rank: int) -> None:
    class Rewrap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return Forwarding(gradient * (1 + rank))

    model = nn.Linear(3, 2)
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(1, 3))  # a forward without a backward
    for _ in range(2):
        ddp.zero_grad()
        output = ddp(torch.ones(1, 3))
        (Rewrap.apply(model.weight).sum() + Rewrap.apply(model.bias).sum() + 0 * output.sum()).backward()
        for parameter in model.parameters():
            assert_close(plain(parameter.grad), torch.full(parameter.shape, 1.5))


def test_a_plan_of_memory_counts_inner_tensors() -> None:
    plan = plan_memory(lambda: Lora(frozen(0)), ranks=2)
    assert plan.sizes.parameters == 4 * 3 + 4 * 4 + 4 * 3 * 4


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "reduce": lambda tensor: dist.reduce(tensor, 0),
    "all_gather": lambda tensor: dist.all_gather([torch.ones(4, 3), torch.ones(4, 3)], tensor),
    "send": lambda tensor: dist.isend(tensor, 1 - dist.get_rank()),
}


# These calls work: they only read the tensor, or add contiguous memory to contiguous memory.
POSSIBLE = (("expanded", "all_gather"), ("expanded", "send"), ("nested", "all_reduce"))


def unusual(kind: str) -> Any:
    return {
        "quantised": lambda: Quantised.make(0),
        "zeros": lambda: torch._efficientzerotensor((4, 3)),
        "expanded": lambda: torch.ones(4, 1).expand(4, 3),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }[kind]()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["quantised", "zeros", "nested", "expanded"])
@pytest.mark.parametrize("call", COLLECTIVES)
@kept_ranks(2, group=None)
def test_collectives_refuse_tensors_without_memory(rank: int, call: str, kind: str) -> None:
    with torch_group(rank):
        if (kind, call) in POSSIBLE:
            return
        with pytest.raises(ConfigError):
            COLLECTIVES[call](unusual(kind))
        whole = torch.ones(2)
        dist.all_reduce(whole)  # the process group still works
        assert whole.tolist() == [2, 2]
