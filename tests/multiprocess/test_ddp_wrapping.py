"""The wrapper object: broadcasts, access to the module, deletion, and process groups."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from paceline.errors import ConfigError
from paceline.torch import DistributedDataParallel
from tests.alive import syncs_alive
from tests.harness import kept_ranks, ranks
from tests.multiprocess.ddp_models import bits, mixed, train, two_layers

PATHS = ["group", "memory"]
Pair = namedtuple("Pair", "value extra")


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_wrapping_gives_all_ranks_the_weights_of_rank_0(rank: int, path: str) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(2, 2).requires_grad_(False))
    model = model.to(memory_format=torch.channels_last)
    model[1].running_mean.fill_(rank + 1.0)
    before = bits(model)
    DistributedDataParallel(model, reduce_through=path, init_sync=False)
    assert bits(model) == before
    DistributedDataParallel(model, reduce_through=path, broadcast_buffers=False)
    assert_close(model[1].running_mean, torch.full((3,), rank + 1.0))
    DistributedDataParallel(model, reduce_through=path)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, bits(model))
    assert gathered[0] == gathered[1]
    assert_close(model[1].running_mean, torch.ones(3))


@kept_ranks(2, group="gloo")
def test_evaluation_on_one_rank_waits_for_no_rank(rank: int) -> None:
    ddp = DistributedDataParallel(mixed())
    x = torch.randn(4, 1, 4, 4)
    if rank == 0:
        ddp.eval()
        ddp(x)
        with torch.no_grad():
            ddp(x)
        ddp.train()
    train(ddp, x)


@kept_ranks(2, group="gloo")
def test_the_wrapper_gives_access_to_its_module(rank: int) -> None:
    model = mixed()
    ddp = DistributedDataParallel(model)
    assert ddp.module is model
    assert list(ddp.state_dict()) == [f"module.{name}" for name in model.state_dict()]
    ddp.load_state_dict(ddp.state_dict())
    assert not ddp.eval().module.training
    assert ddp.process_group is dist.group.WORLD
    again = pickle.loads(pickle.dumps(DistributedDataParallel(two_layers(), bucket_cap_mb=1)))
    train(again, torch.ones(1, 4))


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        y = self.layer(x) * scale
        return {"pair": Pair(y, [y.sum()]), "name": "outputs", "constant": x}


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_module_can_be_wrapped_again_after_its_wrapper_is_gone(rank: int, path: str) -> None:
    model = two_layers()
    x = torch.full((1, 4), 1.0 + rank)
    for view in (True, False):
        ddp = DistributedDataParallel(model, reduce_through=path, gradient_as_bucket_view=view)
        model.zero_grad()
        ddp(x).sum().backward()
        del ddp
        assert not model[0].weight._post_accumulate_grad_hooks
        assert_close(model[2].bias.grad, torch.ones(2))  # the gradient outlives the wrapper
        model.zero_grad()
        assert syncs_alive() == 0
    model(x).sum().backward()  # without a wrapper


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_wrapper_may_be_deleted_before_the_backward(rank: int, path: str) -> None:
    model = two_layers()
    x = torch.full((1, 4), 1.0 + rank)

    def wrapped() -> DistributedDataParallel:
        return DistributedDataParallel(model, reduce_through=path, bucket_cap_mb=0.00001)

    for _ in range(2):
        model.zero_grad()
        ddp = wrapped()
        loss, other = ddp(x).sum() * (1 + rank), ddp(x).sum()
        del ddp
        (loss + 0 * other).backward(retain_graph=True)
        assert_close(model[2].bias.grad, torch.full((2,), 1.5))
        # The losses still exist, but their backwards have run, so the hooks are removed.
        assert not model[0].weight._post_accumulate_grad_hooks
        with pytest.raises(ConfigError, match="whose wrapper is gone"):
            loss.backward()
    kept = wrapped()(x)  # its backward never runs
    unhooked = weakref.ref(kept)
    assert model[0].weight._post_accumulate_grad_hooks
    del kept, loss, other
    gc.collect()
    assert unhooked() is None and not model[0].weight._post_accumulate_grad_hooks
    model.zero_grad()
    assert syncs_alive() == 0


@kept_ranks(2, group="gloo")
def test_structured_outputs_and_keywords(rank: int) -> None:
    ddp = DistributedDataParallel(Outputs())
    out = ddp(torch.full((1, 3), 1.0 + rank), scale=2.0)
    assert isinstance(out["pair"], Pair) and out["name"] == "outputs"
    (out["pair"].value.sum() + out["pair"].extra[0]).backward()
    assert_close(ddp.module.layer.weight.grad, torch.full((3, 3), 6.0))


@ranks(2, group=None)
def test_without_torch_distributed_the_group_is_made_from_the_environment(rank: int) -> None:
    model = two_layers()
    ddp = DistributedDataParallel(model)
    assert ddp.gradient_path == "memory" and ddp.process_group is None
    second = DistributedDataParallel(two_layers())  # shares the group
    for each in (ddp, second):
        each(torch.full((1, 4), 1.0 + rank)).sum().backward()
    assert_close(model[2].bias.grad, torch.ones(2))
    with pytest.raises(ConfigError, match="host memory only"):
        DistributedDataParallel(two_layers(), reduce_through="group")


@kept_ranks(2, group="gloo")
def test_sub_groups_and_meshes(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    alone = [dist.new_group([r]) for r in range(2)][rank]
    single = DistributedDataParallel(two_layers(), process_group=alone)
    assert single.gradient_path == "nothing"
    single(torch.full((1, 4), 1.0 + rank)).sum().backward()
    assert single.grad_norm() > 0 and single.waited_s == 0
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    train(DistributedDataParallel(two_layers(), device_mesh=mesh["dp"]), torch.ones(1, 4))
    with pytest.raises(ConfigError, match="2 dimensions"):
        DistributedDataParallel(two_layers(), device_mesh=mesh)
    with pytest.raises(ConfigError, match="pass one of them"):
        DistributedDataParallel(two_layers(), device_mesh=mesh["dp"], process_group=alone)


@kept_ranks(2, group="gloo")
def test_a_model_changed_after_wrapping_is_noticed_at_the_next_forward(rank: int) -> None:
    x = torch.ones(1, 4)

    def wrapped() -> tuple[nn.Sequential, DistributedDataParallel]:
        model = two_layers()
        model[0].bias.requires_grad_(False)
        return model, DistributedDataParallel(model)

    model, ddp = wrapped()
    model[0].bias.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"unfrozen: 0\.bias"):
            ddp(x)
    model[0].bias.requires_grad_(False)
    ddp(x)
    model, ddp = wrapped()
    model.append(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"added: 3\.weight, 3\.bias"):
        ddp(x)
    model, ddp = wrapped()
    model[2].weight = nn.Parameter(torch.ones(2, 5))
    with pytest.raises(ConfigError, match=r"replaced: 2\.weight"):
        ddp(x)
