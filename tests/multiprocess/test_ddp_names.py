"""The attributes and methods of torch's DDP class and objects exist in ours, with equal values."""

from __future__ import annotations

import copy
import gc
import inspect
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing import assert_close

from paceline.errors import ConfigError, UnusedParameterError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import Branches, train, two_layers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from-ddp.md"
PATHS = ["memory", "group"]
OPTIONS: list[dict[str, Any]] = [  # only the options of the installed version of torch
    options
    for options in (
        {},
        {"bucket_cap_mb": 2, "find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb_list": [1, 4, 2], "batched_grad_copy": True, "forward_sync_buffers": False},
        {"skip_all_reduce_unused_params": True, "static_graph": True, "dim": 1},
    )
    if options.keys() <= inspect.signature(TorchDDP).parameters.keys()
]
# Objects with the same methods but classes of our own, and the attribute of how torch copies inputs.
OF_ITS_OWN = {"logger", "reducer", "process_group", "use_side_stream_for_tensor_copies"}


def with_buffers() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.register_buffer("ignored", torch.zeros(1))
    model._ddp_params_and_buffers_to_ignore = ["ignored"]
    return model


def is_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and is_equal(list(ours.values()), list(theirs.values()))
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(is_equal, ours, theirs))
    return ours is theirs if isinstance(theirs, torch.Tensor) else bool(ours == theirs)


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "defaults"))
@kept_ranks(1, group="gloo")
def test_objects_have_the_attributes_of_torchs_objects(rank: int, options: dict[str, Any]) -> None:
    model = with_buffers()
    theirs = TorchDDP(model, **options)
    ours = DistributedDataParallel(model, **options)
    for name in sorted(public(vars(theirs))):
        assert hasattr(ours, name), name
        if name not in OF_ITS_OWN:
            assert is_equal(getattr(ours, name), getattr(theirs, name)), name
    assert not ours.use_side_stream_for_tensor_copies and ours.process_group is theirs.process_group
    for name in sorted(public(vars(TorchDDP))):
        assert hasattr(DistributedDataParallel, name), name
    # The page documents all of them.
    documented = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    (line,) = re.findall(r"^These attributes of torch's objects .*", PAGE.read_text(), re.MULTILINE)
    documented |= set(re.findall(r"`(\w+)`", line))
    assert public(vars(theirs)) | public(vars(TorchDDP)) <= documented | {"training"}


@kept_ranks(2, group="gloo")
def test_the_device_mesh_is_the_argument(rank: int) -> None:
    model = two_layers()
    model.device_mesh = "the model's own"
    mesh = init_device_mesh("cpu", (2,))
    for options, expected in (({"device_mesh": mesh}, mesh), ({}, None)):
        for ddp in (DistributedDataParallel(model, **options), TorchDDP(model, **options)):
            assert getattr(ddp, "device_mesh", None) is expected
    assert DistributedDataParallel(model, device_mesh=mesh).module.device_mesh == "the model's own"


@kept_ranks(1, group="gloo")
def test_the_data_parallel_parameters_exclude_ignored_ones(rank: int) -> None:
    model = two_layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    ddp = DistributedDataParallel(model)
    named = dict(DistributedDataParallel._get_data_parallel_params(model, named_params=True))
    assert set(named) == {"0.weight", "2.weight", "2.bias"}
    found = list(ddp._get_data_parallel_params(ddp.module))
    assert [id(p) for p in found] == [id(p) for p in named.values()]


@kept_ranks(2, group="gloo")
def test_nothing_is_averaged_after_the_hooks_are_removed(rank: int) -> None:
    model = two_layers()
    before = DistributedDataParallel(model)
    x = torch.full((1, 4), 1.0 + rank)
    train(before, x)
    late = before(x).sum() * (1 + rank)
    (before if rank else before.reducer)._remove_autograd_hooks()
    model.zero_grad()
    with pytest.raises(ConfigError, match="wrapper is gone"):
        late.backward()
    model.zero_grad()
    (model(x).sum() * (1 + rank)).backward()
    assert_close(model[2].bias.grad, torch.full((2,), 1.0 + rank))  # this rank's local gradient
    with pytest.raises(ConfigError, match="_remove_autograd_hooks"):
        before(x)
    assert_close(before.eval()(x), model(x))
    after = DistributedDataParallel(model.train())
    del before
    gc.collect()
    model.zero_grad()
    (after(x).sum() * (1 + rank)).backward()
    assert_close(model[2].bias.grad, torch.full((2,), 1.5))


PHASES = ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap")


class Slow(nn.Module):
    """Sleeps in forward before its first layer, and in backward between its two layers."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 400), nn.Linear(400, 2)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        hidden = self.first(x)
        hidden.register_hook(lambda _: time.sleep(self.backward_s))
        return self.last(hidden)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_times_are_those_of_forward_backward_and_averaging(rank: int, path: str) -> None:
    """Checks lower bounds only: a sleep is never shorter than its argument, nor is a wait for it."""
    forward_s, backward_s = 0.02, 0.03
    model = Slow(forward_s, backward_s if rank else 0.0)
    ddp = DistributedDataParallel(model, reduce_through=path, bucket_cap_mb_list=[0.001, 1])
    begun = time.time_ns()
    for number in range(6):
        data = ddp._get_ddp_logging_data()
        assert ("avg_forward_compute_time" in data) == (number >= 2)
        assert data["iteration"] == max(0, number - 1)
        ddp(torch.ones(2, 4)).sum().backward()
    data = ddp._get_ddp_logging_data()
    elapsed = time.time_ns() - begun
    assert data["iteration"] == 5
    for prefix in ("", "avg_"):
        forward, backward, comm, overlap = (data[f"{prefix}{phase}_time"] for phase in PHASES)
        assert forward >= forward_s * 1e9
        assert 0 <= overlap <= min(backward, comm)
        if rank:
            # The first bucket is complete before this rank's sleep in backward, and averaged after it. (Rank
            # 0 may complete its bucket after rank 1 has slept for a while, so it has no such bound.)
            assert comm >= backward_s * 1e9
            assert backward >= overlap >= backward_s * 1e9
        assert forward + backward + comm - overlap < elapsed
    start, computing, launched, computed, ended = (
        data[name]
        for name in (
            "forward_compute_time_start",
            "backward_compute_time_start",
            "backward_comm_time_start",
            "backward_compute_time_end",
            "backward_comm_time_end",
        )
    )
    assert begun <= start < computing <= launched <= computed <= ended <= begun + elapsed + 10**9
    assert data["backward_comm_time"] == ended - launched


@kept_ranks(2, group="gloo")
def test_backwards_are_timed_at_the_sampling_rate(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    x = torch.ones(1, 4)
    seen = []
    for number in range(25):
        if number == 3:
            ddp._set_ddp_runtime_logging_sample_rate(4)
        with ddp.no_sync():
            ddp(x).sum().backward()
        ddp(x).sum().backward()
        seen.append(ddp._get_ddp_logging_data()["iteration"])
    assert seen == [*range(10), 9, 9, *[12] * 4, *[16] * 4, *[20] * 4, 24]


def facts_of(ddp: nn.Module, *names: str) -> list[Any]:
    data = ddp._get_ddp_logging_data()
    return [data.get(name) for name in names]


@kept_ranks(1, group="gloo")
def test_logging_data_equals_torchs(rank: int) -> None:
    """Both report the same names, values and units for the same model."""
    for model in (with_buffers(), two_layers().double()):
        theirs = TorchDDP(model)._get_ddp_logging_data()
        ours = DistributedDataParallel(model)._get_ddp_logging_data()
        assert len(theirs) > 20 and {name: ours.get(name) for name in theirs} == theirs
    # After training, ours has every name of torch's. A single rank averages nothing, so values may differ.
    reports = []
    for wrap in (TorchDDP, DistributedDataParallel):
        ddp = wrap(two_layers())
        ddp.register_comm_hook(None, allreduce_hook)
        for _ in range(3):
            ddp(torch.ones(1, 4)).sum().backward()
        reports.append(ddp._get_ddp_logging_data())
    assert set(reports[0]) <= set(reports[1])
    assert reports[1]["comm_hook"] == reports[0]["comm_hook"] == "allreduce_hook"
    assert reports[1]["can_set_static_graph"] == 1
    builtin = dist.BuiltinCommHookType.FP16_COMPRESS
    for wrap in (TorchDDP, DistributedDataParallel):
        ddp = wrap(two_layers())
        ddp._register_builtin_comm_hook(builtin)
        assert ddp._get_ddp_logging_data()["comm_hook"] == str(builtin)


@kept_ranks(2, group="gloo")
def test_errors_are_reported_under_torchs_names(rank: int) -> None:
    for wrap in (TorchDDP, DistributedDataParallel):
        ddp = wrap(two_layers())
        assert not {"has_error", "error"} & set(ddp._get_ddp_logging_data())
        with pytest.raises(TypeError) as caught:
            ddp.register_comm_hook(None, 3)
        assert facts_of(ddp, "has_error") == [1]
        assert str(caught.value) in facts_of(ddp, "error")[0]
    assert facts_of(copy.deepcopy(ddp), "has_error") == [None]
    # Errors of a backward and of a forward are reported, too.
    ddp = DistributedDataParallel(nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)}))
    with pytest.raises(UnusedParameterError) as unused:
        ddp.used(torch.ones(1, 4)).sum().backward()
    assert facts_of(ddp, "error") == [f"UnusedParameterError: {unused.value}"]
    ddp.module["idle"] = nn.Linear(4, 4)
    with pytest.raises(ConfigError) as changed:
        ddp(torch.ones(1, 4))
    assert facts_of(ddp, "has_error", "error") == [1, f"ConfigError: {changed.value}"]


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_buckets_and_order_are_reported_as_by_torch(rank: int, path: str) -> None:
    model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(3)))  # 1.87 MiB per layer
    theirs = TorchDDP(model, bucket_cap_mb=2)
    ours = DistributedDataParallel(model, bucket_cap_mb=2, reduce_through=path)
    for ddp in (theirs, ours):
        for _ in range(3):
            ddp(torch.ones(1, 700)).sum().backward()
    same = ("prev_iteration_grad_ready_order_indices", "unused_parameter_size", "has_rebuilt_buckets")
    # torch before 2.8 omits values of 0.
    assert facts_of(ours, *same) == [
        fact or 0 if name == same[1] else fact for name, fact in zip(same, facts_of(theirs, *same))
    ]
    # Paceline fills its buckets differently, so the rest is checked for consistency only.
    sizes, indices, count = facts_of(
        ours, "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices", "num_buckets_reduced"
    )
    buckets = [[int(index) for index in bucket.split(" ")] for bucket in indices.split(", ")]
    assert {index for bucket in buckets for index in bucket} == set(range(6))
    assert len(buckets) == len(sizes.split(", ")) == count >= 3
    assert sum(map(int, sizes.split(", "))) == sum(p.nbytes for p in model.parameters())
    assert all(int(size) <= 2 << 20 for size in sizes.split(", "))


def used_by(kind: str) -> Iterator[str]:
    while True:
        yield from {
            "the same": ["left"],
            "not the same": ["left", "right"],
            "sometimes all": ["left", "both"],
        }[kind]


@pytest.mark.parametrize(("kind", "is_static"), [("the same", 1), ("not the same", 0), ("sometimes all", 0)])
@kept_ranks(2, group="gloo")
def test_a_static_graph_is_reported(rank: int, kind: str, is_static: int) -> None:
    """The report does not depend on zeros left in `.grad`, with which unused parameters are averaged, too."""
    for set_to_none in (True, False):
        ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
        assert "can_set_static_graph" not in ddp._get_ddp_logging_data()
        for _, branch in zip(range(4), used_by(kind), strict=False):
            ddp.zero_grad(set_to_none=set_to_none)
            ddp(torch.ones(1, 3), branch).sum().backward()
        assert ddp._get_ddp_logging_data()["can_set_static_graph"] == is_static
        assert ddp.reducer._ddp_graph_static() == bool(is_static)
        assert ddp._get_ddp_logging_data()["unused_parameter_size"] in (4 * 8, 2 * 4 * 8)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_profilers_show_each_average(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path)
    x = torch.ones(1, 4)
    train(ddp, x)
    for profile in (torch.profiler.profile, torch.autograd.profiler.profile):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # profilers warn about accelerators
            with profile() as profiler:
                for _ in range(3):
                    with ddp.no_sync():
                        ddp(x).sum().backward()
                    ddp(x).sum().backward()
        (row,) = [row for row in profiler.key_averages() if row.key == "paceline::average"]
        assert row.count == 3 and row.cpu_time_total > 0
    train(ddp, x)  # training still works without the profiler


@kept_ranks(2, group="gloo")
def test_a_profiled_backward_that_raises_is_reported_as_any_other(rank: int) -> None:
    ddp = DistributedDataParallel(Branches())
    with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="got no gradient"):
        ddp(torch.ones(1, 3), "left").sum().backward()
