"""Paceline's class keeps the promises of torch's for its constructor and names; without a second process."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as TorchDDP  # noqa: E402

from paceline.errors import ConfigError  # noqa: E402
from paceline.torch import DistributedDataParallel  # noqa: E402
from paceline.torch.model.config import make_config  # noqa: E402


def config(**arguments: Any) -> Any:
    """make_config with the constructor's defaults."""
    signature = inspect.signature(DistributedDataParallel)
    defaults = {name: p.default for name, p in signature.parameters.items()}
    for name in ("module", "process_group", "device_mesh", "later"):
        del defaults[name]
    return make_config(**{**defaults, **arguments})


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy"),
    reason="before torch 2.7, only its compiler can exclude code from tracing",
)
def test_a_step_does_not_import_the_compiler() -> None:
    """It takes seconds, on every rank. A single rank averages, with hooks, if it is to raise on a NaN."""
    code = """
        import sys, torch
        from paceline.torch import DistributedDataParallel
        model = DistributedDataParallel(torch.nn.Linear(2, 2), nonfinite="raise")
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        assert model.grad_norm() > 0
        print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
    """
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[]"


def test_torchs_arguments_are_all_there_with_torchs_defaults() -> None:
    ours = inspect.signature(DistributedDataParallel).parameters
    theirs = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    for name, parameter in theirs.items():
        if name == "broadcast_buffers":
            assert ours[name].default is None and parameter.default in (None, True)  # True before torch 2.13
        elif name != "self":
            assert name in ours and ours[name].default == parameter.default, name


def test_arguments_of_a_later_torch_are_taken_with_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(self: object, module: object, sprinkles: str = "none") -> None: ...

    with pytest.raises(TypeError, match="unexpected keyword argument 'sprinkles'"):
        config(sprinkles="none")
    monkeypatch.setattr(TorchDDP, "__init__", later)
    config(sprinkles="none")
    with pytest.raises(ConfigError, match="sprinkles='many'"):
        config(sprinkles="many")
    with pytest.raises(TypeError, match="unexpected keyword argument 'icing'"):
        config(icing=True)


def test_defaults() -> None:
    made = config()
    assert (made.bucket_cap_bytes, made.first_bucket_bytes) == (25 << 20, 1 << 20)
    assert made.broadcast_buffers and made.init_sync and not made.allow_unused


def test_forward_sync_buffers_does_not_touch_wrapping() -> None:
    assert config(forward_sync_buffers=False).init_sync_buffers
    assert not config(broadcast_buffers=False).init_sync_buffers
    assert not config(init_sync_buffers=False).init_sync_buffers
    assert config(init_sync_buffers=True, broadcast_buffers=False).init_sync_buffers
    with pytest.warns(FutureWarning, match="broadcast_buffers is ignored"):
        both = config(broadcast_buffers=False, forward_sync_buffers=True)
    assert both.init_sync_buffers and both.broadcast_buffers


def test_a_misspelt_argument_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="'bucket_cap_gb'"):
        config(bucket_cap_gb=1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"bucket_cap_mb": 0},
        {"nonfinite": "explode"},
        {"reduce_through": "carrier pigeon"},
        {"timeout_s": -1},
        {"warn_after_s": 0},
        {"device_ids": [0, 1]},
        {"output_device": "cpu"},
        {"device_ids": [torch.device("cpu")], "output_device": torch.device("meta")},
    ],
)
def test_values_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        config(**arguments)


def test_check_reduction_and_one_device_are_accepted() -> None:
    assert config(check_reduction=True, device_ids=[torch.device("cpu")]).device == torch.device("cpu")


def test_nothing_of_torchs_class_is_inherited_by_accident() -> None:
    """It would run on state that Paceline's class does not have."""
    own = {
        "train",
        "_active_ddp_module",
        "_get_active_ddp_module",
        "_set_params_and_buffers_to_ignore_for_model",
    }
    own |= {
        name for name in vars(TorchDDP) if name.startswith("__") and not callable(getattr(TorchDDP, name))
    }
    for name in set(vars(TorchDDP)) - own:
        ours = inspect.getattr_static(DistributedDataParallel, name)
        assert ours is not inspect.getattr_static(TorchDDP, name), name
    assert not hasattr(DistributedDataParallel, "_lazy_init")
