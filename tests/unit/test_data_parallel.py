"""DataParallel on CPU "devices" against the module itself with the whole batch."""

from __future__ import annotations

import collections
import copy
import dataclasses
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.testing import assert_close  # noqa: E402

from paceline.errors import ConfigError  # noqa: E402
from paceline.torch import DataParallel  # noqa: E402
from paceline.torch.data_parallel.replicas import Spread, replicate, tree_rounds  # noqa: E402
from paceline.torch.data_parallel.scatter import gather, scatter  # noqa: E402

CPU = torch.device("cpu")
COUNTS = [None, 1, 2, 3, 5]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 2)).double()


def wrap(module: nn.Module, count: int | None, **arguments: Any) -> DataParallel:
    return DataParallel(module, None if count is None else ["cpu"] * count, **arguments)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("batch", [1, 4, 7])
def test_outputs_and_gradients_are_those_of_the_module(count: int | None, batch: int) -> None:
    module, x = model(), torch.randn(batch, 4, dtype=torch.float64, requires_grad=True)
    alone, alone_x = copy.deepcopy(module), x.detach().clone().requires_grad_()
    parallel = wrap(module, count)
    for _ in range(2):
        out, expected = parallel(x), alone(alone_x)
        assert_close(out, expected)
        out.square().mean().backward()
        expected.square().mean().backward()
    assert_close(x.grad, alone_x.grad)
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("count", COUNTS)
def test_the_loss_on_each_replica_is_that_of_the_whole_batch(count: int | None, reduction: str) -> None:
    module, loss_fn = model(), nn.MSELoss(reduction=reduction)
    alone = copy.deepcopy(module)
    x, y = torch.randn(7, 4).double(), torch.randn(7, 2).double()
    loss = wrap(module, count, loss_fn=loss_fn)(x, loss_inputs=(y,))
    expected = loss_fn(alone(x), y)
    assert_close(loss, expected)
    loss.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("count", COUNTS)
def test_a_loss_of_sum_and_count_is_a_mean_over_tokens(count: int | None) -> None:
    module, x = model(), torch.randn(6, 4).double()
    labels = torch.tensor([0, -100, -100, -100, 1, 0])

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.cross_entropy(output, target, reduction="sum"), (target != -100).sum()

    loss = wrap(module, count, loss_fn=loss_fn)(x, loss_inputs=(labels,))
    assert_close(loss, nn.functional.cross_entropy(module(x), labels))


def test_outputs_are_not_gathered_for_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = wrap(model(), 2, loss_fn=nn.MSELoss())
    monkeypatch.setattr(parallel, "gather", lambda *_: pytest.fail("gathered"))
    parallel(torch.randn(4, 4).double(), loss_inputs=(torch.zeros(4, 2).double(),))


def test_outputs_come_to_the_output_device() -> None:
    module, x = model(), torch.randn(5, 4).double()
    parallel = wrap(module, 2, output_device="cpu")
    output = parallel(x)
    assert output.device == parallel.output_device == CPU
    assert_close(output, module(x))


def test_loss_inputs_without_a_loss_and_of_another_size_are_refused() -> None:
    x = torch.randn(4, 4).double()
    with pytest.raises(ConfigError, match="no loss function"):
        wrap(model(), 2)(x, loss_inputs=(x,))
    with pytest.raises(ConfigError, match="different sizes"):
        wrap(model(), 4, loss_fn=nn.MSELoss())(x, loss_inputs=(x[:1],))


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Out:
    first: torch.Tensor
    rest: dict[str, Any]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pair: Pair, *, more: list[Any], flag: str) -> Out:
        assert flag == "whole" and more[1] is None
        return Out(pair.left * self.scale, {"sum": (pair.right + more[0], flag), "none": None})


@pytest.mark.parametrize("count", [None, 1, 3])
def test_nested_inputs_and_outputs(count: int | None) -> None:
    left, right, third = torch.randn(3, 5, 2).unbind()
    out = wrap(Nested(), count)(Pair(left, right), more=[third, None], flag="whole")
    assert isinstance(out, Out)
    assert_close(out.first, left)
    assert_close(out.rest["sum"][0], right + third)
    assert out.rest["sum"][1] == "whole" and out.rest["none"] is None


def test_scatter_of_containers_and_fewer_samples_than_devices() -> None:
    assert [part.tolist() for part in scatter(torch.arange(3), [CPU] * 8)] == [[0], [1], [2]]
    parts = scatter({"a": torch.zeros(4, 2), "b": ()}, [CPU] * 2, dim=1)
    assert [part["a"].shape for part in parts] == [(4, 1)] * 2 and parts[0]["b"] == ()
    with pytest.raises(RuntimeError, match="shape \\(\\) along dimension 0"):
        scatter(torch.tensor(1.0), [CPU] * 2)


def test_other_dimension_and_no_inputs() -> None:
    class Columns(nn.Module):
        def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
            return torch.ones(2, 1) if x is None else x * 2

    x = torch.randn(2, 5)
    assert_close(wrap(Columns(), 2, dim=1)(x), x * 2)
    assert_close(wrap(Columns(), 2)(), torch.ones(2, 1))


def test_gather_refuses_what_differs() -> None:
    with pytest.raises(ValueError, match="keys"):
        gather([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], CPU)
    with pytest.raises(ValueError, match="lengths"):
        gather([(torch.zeros(1),), ()], CPU)
    with pytest.raises(ValueError, match="types"):
        gather([torch.zeros(1), None], CPU)
    with pytest.raises(TypeError, match="of type int that differ"):
        gather([1, 2], CPU)
    with pytest.warns(UserWarning, match="scalars"):
        assert gather([torch.tensor(1), torch.tensor(2)], CPU).tolist() == [1, 2]


def test_replicas_run_at_the_same_time_and_share_the_callers_state() -> None:
    seen: list[tuple[bool, bool]] = []
    together = threading.Barrier(3, timeout=20)

    class Watching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            together.wait()
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            return x

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        wrap(Watching(), 3)(torch.zeros(3))
    assert seen == [(False, True)] * 3


def test_an_error_keeps_its_type_and_names_the_replica() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x[0] == 1:
                raise KeyError("no such thing")
            return x

    with pytest.raises(KeyError, match="replica 1 on device cpu"):
        wrap(Failing(), 2)(torch.arange(2))


def test_the_first_replica_writes_the_modules_buffers() -> None:
    module = nn.BatchNorm1d(2)
    x = torch.randn(6, 2)
    alone = copy.deepcopy(module)
    wrap(module, 2)(x)
    alone(x[:3])
    assert_close(module.running_mean, alone.running_mean)
    assert module.num_batches_tracked == 1


def test_a_gradient_penalty() -> None:
    module, x = model(), torch.randn(6, 4).double().requires_grad_()
    alone = copy.deepcopy(module)
    for one in (wrap(module, 3), alone):
        (slope,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:
            assert_close(ours.grad, theirs.grad)


def test_unused_frozen_and_sparse_parameters() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 2, sparse=True)
            self.idle = nn.Linear(2, 2)
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
            self.lists = nn.ParameterList([torch.ones(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x) * self.frozen * self.lists[0]

    module, x = Words(), torch.tensor([0, 1, 1, 4])
    wrap(module, 2)(x).sum().backward()
    assert module.idle.weight.grad is None and module.frozen.grad is None
    assert module.table.weight.grad.to_dense()[:, 0].tolist() == [1, 2, 0, 0, 1]
    assert_close(module.lists[0].grad, module.table.weight.detach()[x].sum(0))


@pytest.mark.parametrize("count", range(1, 18))
def test_the_tree_adds_each_partial_sum_once_and_overloads_no_device(count: int) -> None:
    rounds = list(tree_rounds(count))
    assert sorted(sender for pairs in rounds for _, sender in pairs) == list(range(1, count))
    sums = list(range(count))
    for pairs in rounds:
        assert len({place for pair in pairs for place in pair}) == 2 * len(pairs)
        for receiver, sender in pairs:
            sums[receiver] += sums[sender]
    assert sums[0] == sum(range(count)) and len(rounds) == (count - 1).bit_length()


def test_spread_adds_what_there_is() -> None:
    value = torch.ones(2, requires_grad=True)
    parts = Spread.apply((CPU,) * 5, value)
    (parts[1] * 2 + parts[4] * 3).sum().backward()
    assert value.grad.tolist() == [5, 5]


def test_where_the_module_lies_is_checked() -> None:
    with pytest.raises(RuntimeError, match=r"on device cpu \(device_ids\[0\]\) but found .* meta"):
        wrap(model().to("meta"), 2)(torch.zeros(2, 4).double())
    with pytest.raises(ValueError, match="one kind"):
        DataParallel(model(), ["cpu", "meta"])


def test_attributes_and_what_unwraps_models() -> None:
    module = model()
    parallel = DataParallel(module, ["cpu", "cpu"])
    assert isinstance(parallel, nn.DataParallel) and parallel.module is module
    assert (parallel.device_ids, parallel.output_device, parallel.dim) == ([CPU, CPU], CPU, 0)
    assert list(parallel.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    if not torch.accelerator.is_available():
        assert DataParallel(module).device_ids == DataParallel(module, [0, 1]).device_ids == []


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_torchscript_cannot_be_replicated() -> None:
    traced = nn.Sequential(nn.Linear(2, 2))
    traced[0] = torch.jit.trace(traced[0], torch.zeros(1, 2))
    with pytest.raises(ConfigError, match=r"'0' .* TorchScript"):
        replicate(traced, [CPU, CPU])
