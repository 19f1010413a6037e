"""The hook in the core hands over the same as the Python hook, and leaves unusual cases to it."""

from __future__ import annotations

import copy
import gc
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from paceline import _core  # noqa: E402
from paceline.errors import PacelineError  # noqa: E402
from paceline.reducer.backward.state import BackwardState  # noqa: E402
from paceline.torch import DistributedDataParallel  # noqa: E402
from paceline.torch.backward import autograd, gradient_hooks  # noqa: E402
from tests.alive import syncs_alive  # noqa: E402
from tests.harness.warm import warm_python  # noqa: E402

IS_THERE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


@pytest.fixture(params=[True, False], ids=["", "old-torch"])
def has_exchange_api(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if the core may read tensors itself; otherwise all is as with torch before 2.10."""
    if request.param and not IS_THERE:
        pytest.skip("this torch has no DLPack exchange API")
    monkeypatch.setattr(gradient_hooks, "HAS_EXCHANGE_API", request.param)
    monkeypatch.setattr(autograd, "HAS_EXCHANGE_API", request.param)
    return request.param


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank averages its gradients, with itself, if it is to raise on a NaN."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    yield
    gc.collect()


class Gradient(torch.autograd.Function):
    """Passes its input on; a function computes the gradient."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


class Model(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(6.0).reshape(2, 3))  # the first gradient always goes to Python
        self.second = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed = Gradient.apply(self.second, self.change)
        # The backward of the second comes last.
        return (changed.sin() * x).sum() + (self.first * x).sum() * 2


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process group of torch, of this rank alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(model: nn.Module, *, view: bool, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, nonfinite="raise", gradient_as_bucket_view=view, **options)


def hooks_of(parameter: nn.Parameter) -> list[Callable[[torch.Tensor], None]]:
    """The hooks that autograd calls after accumulating a gradient; torch has no public name for them."""
    return list(parameter._post_accumulate_grad_hooks.values())


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda g: g.clone(),
    "a transposed copy": lambda g: g.t().contiguous().t(),
    "an expanded value": lambda g: g.sum().expand_as(g),
    "every other element": lambda g: torch.stack([g, g], -1)[..., 0],
    "negated lazily": lambda g: torch._neg_view(g.clone()),
}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_gradients_of_any_layout(
    change: Callable[[torch.Tensor], torch.Tensor], view: bool, has_exchange_api: bool
) -> None:
    check_layouts(change, has_exchange_api, view=view)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_gradients_of_any_layout_that_are_copied_a_bucket_at_a_time(
    change: Callable[[torch.Tensor], torch.Tensor], has_exchange_api: bool, group: None
) -> None:
    check_layouts(change, has_exchange_api, view=False, reduce_through="group")


def check_layouts(
    change: Callable[[torch.Tensor], torch.Tensor], has_exchange_api: bool, **options: Any
) -> None:
    """Means of a single rank are its own gradients, with and without the core."""
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    alone, model = Model(change), Model(change)
    ddp = wrapped(model, **options)
    is_in_core = {isinstance(hook, _core.GradientHook) for p in model.parameters() for hook in hooks_of(p)}
    assert is_in_core == {has_exchange_api}
    for _ in range(3):  # without zero_grad(): later gradients are added to the existing ones
        alone(x).backward()
        ddp(x).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    ddp.zero_grad()
    alone.zero_grad()
    alone(x).backward()
    ddp(x).backward()
    assert torch.equal(model.second.grad, alone.second.grad)


@pytest.mark.skipif(not IS_THERE, reason="this torch has no DLPack exchange API")
@pytest.mark.parametrize("view", [False, True])
def test_the_core_takes_what_is_usual(view: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    ddp = wrapped(model, view=view)
    assert {type(hook) for parameter in model.parameters() for hook in hooks_of(parameter)} == {
        _core.GradientHook
    }
    ddp(torch.ones(1, 3)).sum().backward()
    kept = [parameter.grad for parameter in model.parameters()]
    ddp.zero_grad()
    ddp(torch.ones(1, 3)).sum().backward()
    same = [parameter.grad is old for parameter, old in zip(model.parameters(), kept)]
    assert same == [view] * 4  # in view mode autograd's tensor moves into the gradient buffer


@pytest.mark.skipif(not IS_THERE, reason="this torch has no DLPack exchange API")
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize(("width", "expected"), [(3, []), (300, [1, 1, 2])])
def test_what_waits_to_be_copied_is_read_and_written_once_its_bucket_is_complete(
    group: None, width: int, expected: list[int]
) -> None:
    """Also a gradient with a history: of a backward that can be differentiated again.

    The core itself copies small ones, and torch all others of a bucket at once.
    """
    calls: list[int] = []

    def copy_all(places: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        calls.append(len(places))
        real(places, values)

    real, torch._foreach_copy_ = torch._foreach_copy_, copy_all
    try:
        for create_graph in (False, True):
            layers = [nn.Linear(width, width, bias=False) for _ in range(2)]
            model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
            ddp = wrapped(model, view=False, reduce_through="group", bucket_cap_mb=1e-6)
            for _ in range(2):
                alone = copy.deepcopy(model)
                alone(torch.ones(1, width)).sum().backward()
                ddp.zero_grad()
                calls.clear()
                ddp(torch.ones(1, width)).sum().backward(create_graph=create_graph)
                assert calls == expected
                for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                    assert torch.equal(ours.grad, theirs.grad)
    finally:
        torch._foreach_copy_ = real


@pytest.mark.parametrize("view", [False, True])
def test_a_second_gradient_in_one_backward_is_an_error(view: bool, has_exchange_api: bool) -> None:
    model = Model(CHANGES["as it is"])
    ddp = wrapped(model, view=view)
    model.first.register_post_accumulate_grad_hook(hooks_of(model.first)[0])
    with pytest.raises(PacelineError, match="first"):
        ddp(torch.ones(2, 3)).backward()


@pytest.mark.parametrize("view", [False, True])
def test_a_wrapper_without_users_goes_away(view: bool) -> None:
    model, before = Model(CHANGES["as it is"]), syncs_alive()
    ddp = wrapped(model, view=view)
    for _ in range(2):
        ddp(torch.ones(2, 3)).backward()
    assert syncs_alive() == before + 1
    del ddp
    assert syncs_alive() == before


@pytest.mark.skipif(not IS_THERE, reason="this torch has no DLPack exchange API")
def test_wrong_calls_raise() -> None:
    model = nn.Linear(2, 2)
    ddp = wrapped(model, view=False)  # the hook stays as long as this
    hook = hooks_of(model.weight)[0]
    for arguments in ((), (1, 2)):
        with pytest.raises(TypeError, match="one parameter"):
            hook(*arguments)
    with pytest.raises(TypeError):
        _core.GradientHook(hook, BackwardState(0, 1), 0, object(), "no tensor")
    del ddp


OF_ANOTHER_TORCH = """
import ctypes, sys
import torch

class Api(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("rest", ctypes.c_void_p * 6)]

make = ctypes.pythonapi.PyCapsule_New
make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api, name = Api(major=2), sys.argv[1].encode()
torch.Tensor.__dlpack_c_exchange_api__ = make(ctypes.addressof(api), name, None)

for name in [name for name in sys.modules if name.startswith("paceline.torch")]:
    del sys.modules[name]  # which had found torch's own table
from paceline.torch import DistributedDataParallel

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
alone = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
alone.load_state_dict(model.state_dict())
x = torch.eye(2)
for each in (alone, DistributedDataParallel(model, nonfinite="raise")):
    for _ in range(2):
        each(x).square().sum().backward()
for ours, theirs in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(ours.grad, theirs.grad)
"""


@pytest.mark.parametrize("name", ["dlpack_exchange_api", "another_table"])
def test_a_torch_with_another_table_of_functions(name: str) -> None:
    """Its major version is newer, or even its name is another one: hooks in Python need none of it."""
    command = [warm_python("torch"), "-c", OF_ANOTHER_TORCH, name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
