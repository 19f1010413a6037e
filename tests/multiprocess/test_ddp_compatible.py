"""What other libraries' code does with a wrapped model: unwrap it, copy it, use its attributes."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing import assert_close

from paceline.errors import ConfigError, ReplicaError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import train, two_layers


class Language(nn.Module):
    """Like the models of libraries, it has a configuration, and methods that run forward and that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=3)
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sum()

    def opaque_loss(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self(x).sum())

    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def _private(self) -> int:
        return 1


@kept_ranks(2, group="gloo")
def test_the_modules_own_attributes_and_methods(rank: int) -> None:
    model = Language()
    ddp = DistributedDataParallel(model)
    x = torch.full((1, 3), 1.0 + rank)
    assert ddp.config is model.config and ddp.layer is model.layer and ddp.size() == 12
    assert ddp.loss.__name__ == "loss" and not hasattr(ddp, "_private") and not hasattr(ddp, "nonsense")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ddp.nonsense()

    def means_of(backward: Any) -> torch.Tensor:
        model.zero_grad()
        backward()
        return model.layer.weight.grad[0]

    both, own = torch.full((3,), 1.5), torch.full((3,), 1.0 + rank)
    assert_close(means_of(lambda: ddp.loss(x).backward()), both)
    with ddp.no_sync():
        assert_close(means_of(lambda: ddp.loss(x).backward()), own)
        local = ddp(x).sum()
    if rank == 0:
        assert ddp.size() == 12  # it runs no forward, so one rank may call it alone
    assert_close(means_of(local.backward), own)
    assert_close(means_of(lambda: ddp.opaque_loss(x).loss.backward()), both)
    with torch.no_grad():
        assert not ddp.loss(x).requires_grad


@kept_ranks(2, group="gloo")
def test_weights_with_and_without_the_prefix(rank: int) -> None:
    source = two_layers()
    bare, wrapped = source.state_dict(), DistributedDataParallel(source).state_dict()
    assert set(wrapped) == {f"module.{name}" for name in bare}
    target = nn.Sequential(*[nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)])
    ddp = DistributedDataParallel(target)
    for saved in (bare, wrapped):
        nn.init.zeros_(target[0].weight)
        assert not any(ddp.load_state_dict(saved))
        assert torch.equal(target[0].weight, source[0].weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        ddp.load_state_dict({"0.weight": bare["0.weight"]})
    assert ddp.load_state_dict({"0.weight": bare["0.weight"]}, strict=False).missing_keys
    inner = DistributedDataParallel(nn.ModuleDict({"module": nn.Linear(1, 1)}))  # named like the prefix
    assert not any(inner.load_state_dict(inner.module.state_dict()))
    assert not any(inner.load_state_dict(inner.state_dict()))


@kept_ranks(2, group="gloo")
def test_copies_are_connected_when_they_are_trained(rank: int) -> None:
    model = two_layers().requires_grad_(True)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    ddp.note = "kept"
    x = torch.full((1, 4), 1.0 + rank)
    if rank == 0:  # the other rank need not take part
        for alone in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
            assert alone.note == "kept" and alone.module is not model
            assert_close(alone.eval()(x), model(x))
            with pytest.raises(ConfigError, match="connected to no other rank"):
                alone(x).sum().backward()
            (found,) = torch.autograd.grad(alone(x).sum(), [alone.module[2].bias])
            assert_close(found, torch.ones(2))
    saved = io.BytesIO()
    torch.save(ddp, saved)
    saved.seek(0)
    group = dist.new_group([0, 1])
    other = DistributedDataParallel(two_layers(), process_group=group)
    loaded = torch.load(saved, weights_only=False)
    twin = copy.deepcopy(other)
    assert loaded.process_group is None and twin.process_group is group
    for copied in (loaded, twin):
        (copied(x).sum() * (1 + rank)).backward()
        assert_close(copied.module[2].bias.grad, torch.full((2,), 1.5))
        train(copied, x)
    assert loaded.process_group is dist.group.WORLD and loaded._config == ddp._config
    assert model[2].bias.grad is None
    train(ddp, x)


@kept_ranks(2, group="gloo")
def test_the_half_private_names(rank: int) -> None:
    model = two_layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    x = torch.full((1, 4), 1.0 + rank)
    data = ddp._get_ddp_logging_data()
    assert (data["world_size"], data["rank"], data["backend_name"]) == (2, rank, "gloo")
    assert data["num_parameter_tensors"] == 3 and data["bucket_cap_bytes"] == 1 << 20
    assert data["module_name"] == "Sequential" and data["dtypes"] == "float"
    logged = ddp.logger._get_ddp_logging_data()
    assert {**logged.strs_map, **logged.ints_map} == data
    ddp._set_ddp_runtime_logging_sample_rate(10)
    with pytest.raises(ValueError, match="1 or more"):
        ddp._set_ddp_runtime_logging_sample_rate(0)
    ddp._set_ddp_sink_clone(False)
    assert ddp.parameters_to_ignore == {"0.bias"} and ddp.device_type == "cpu" and ddp.dim == 0
    assert ddp.device_ids is None and ddp.output_device is None and ddp.broadcast_buffers
    assert ddp.require_forward_param_sync and not ddp.find_unused_parameters
    # As Accelerate does to synchronise a backward whose forward was in no_sync().
    with ddp.no_sync():
        loss = ddp(x).sum()
    ddp.reducer._rebuild_buckets()
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    (loss * (1 + rank)).backward()
    assert_close(model[2].bias.grad, torch.full((2,), 1.5))
    # As Lightning does instead of no_sync().
    model.zero_grad()
    ddp.require_backward_grad_sync = False
    (ddp(x).sum() * (1 + rank)).backward()
    assert_close(model[2].bias.grad, torch.full((2,), 1.0 + rank))
    ddp.require_backward_grad_sync = True
    model.zero_grad()
    ddp._check_reducer_finalized()
    model[0].weight.register_hook(_interrupt)
    with pytest.raises(ZeroDivisionError):
        ddp(x).sum().backward()
    with pytest.raises(ReplicaError, match="has not ended"):
        ddp.reducer._check_reducer_finalized()


def _interrupt(_: torch.Tensor) -> None:
    raise ZeroDivisionError


@kept_ranks(2, group="gloo")
def test_a_static_graph_may_be_promised_later(rank: int) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)
    ddp = DistributedDataParallel(model)
    ddp._set_static_graph()
    assert ddp.static_graph
    ddp(torch.ones(1, 2)).sum().backward()
    assert_close(model["used"].bias.grad, torch.ones(2))
    with pytest.warns(UserWarning, match="static_graph is True already"):
        ddp._set_static_graph()


def unwrap(model: nn.Module) -> nn.Module:
    """As Accelerate, Transformers and Lightning do it."""
    while isinstance(model, (nn.DataParallel, TorchDDP)):
        model = model.module
    return model


@kept_ranks(1, group="gloo")
def test_code_that_unwraps_recognises_it(rank: int) -> None:
    model = two_layers()
    ddp = DistributedDataParallel(model)
    assert isinstance(ddp, TorchDDP) and issubclass(type(ddp), TorchDDP)
    assert type(ddp) is DistributedDataParallel and ddp.__class__ is DistributedDataParallel
    assert unwrap(ddp) is model
    assert not isinstance(model, DistributedDataParallel)


@kept_ranks(1, group="gloo")
def test_scatter_gather_and_to_kwargs(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2), dim=0)
    cpu = torch.device("cpu")
    x = torch.arange(4.0).reshape(4, 1)
    inputs, kwargs = ddp.scatter((x,), {"scale": x, "name": "n"}, [cpu, cpu])
    assert [part[0].tolist() for part in inputs] == [[[0.0], [1.0]], [[2.0], [3.0]]]
    assert kwargs[1]["name"] == "n" and kwargs[1]["scale"].tolist() == [[2.0], [3.0]]
    assert torch.equal(ddp.gather([inputs[0][0], inputs[1][0]], cpu), x)
    (moved,), (named,) = ddp.to_kwargs((x, torch.tensor(1.0)), {"k": [x]}, "meta")
    assert moved[0].is_meta and moved[1].is_meta and named["k"][0].is_meta
