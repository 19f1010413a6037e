"""The arguments of `DistributedDataParallel`, checked and collected in one frozen object.

Each argument of torch's DDP takes effect, or is refused with an error; none is ignored silently.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.arguments import show
from paceline.ddp.wrapper_arguments import (
    HOSTS,
    MIB,
    REDUCE_THROUGH,
    SHARED_NAMES,
    WrapperArguments,
    WrapperOptions,
)
from paceline.errors import ConfigError, ConfigTypeError
from paceline.torch.model.arguments import as_device, check_devices
from paceline.torch.model.mixed_precision import as_precision

Weight = float | int | torch.Tensor
"""A finite number that is not negative, such as a number of samples or tokens."""

_arguments = WrapperArguments("DistributedDataParallel", (*REDUCE_THROUGH, HOSTS))
DEFAULT_BUCKET_CAP_MB = 25.0  # torch's defaults, so that communication overlaps as with torch's DDP
DEFAULT_FIRST_BUCKET_BYTES = MIB


_NOT_OPTIONS = (
    "delay_all_reduce_named_params",  # `ManagedTensors` uses these two
    "param_to_hook_all_reduce",
)
"""Arguments of torch's class that `DDPConfig` does not hold."""

_OURS = (
    "buffers",
    "check_replicas_every",
    "compress_between_hosts",
    "deterministic",
    "init_sync_buffers",
    "local_sgd",
    "nonfinite",
    "reduce",
    "reduce_through",
    "share_parameters",
    "timeout_s",
    "virtual_ranks",
    "warn_after_s",
    "weight",
)


@dataclass(frozen=True, kw_only=True)
class DDPConfig(WrapperOptions):
    """The options of a wrapped model.

    Attributes:
        device: Inputs are moved to this device; None: they are not moved.
    """

    device: torch.device | None
    # Whether parameters that no rank uses are allowed. No: they raise, as in torch.
    allow_globally_unused: ClassVar[bool] = False

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        dtype: torch.dtype | None = self.precision.reduce_dtype
        return dtype


def make_config(
    *,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    bucket_cap_mb: float | None,
    mixed_precision: Any,
    batched_grad_copy: bool,
    dim: int = 0,
    check_reduction: bool = False,
    lazy_bucket_allocation: bool = False,
    **others: Any,  # with those of SHARED_NAMES
) -> DDPConfig:
    known = (*_NOT_OPTIONS, *SHARED_NAMES)
    _check_later({name: value for name, value in others.items() if name not in known})
    check = _arguments.check
    check.whole("dim", dim)
    check.flag("check_reduction", check_reduction)
    check.flag("lazy_bucket_allocation", lazy_bucket_allocation)
    cap_mb = DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
    check.flag("batched_grad_copy", batched_grad_copy)  # over a process group, copies are always batched
    options = _arguments.shared(
        others,
        as_precision(mixed_precision),
        _arguments.mebibytes("bucket_cap_mb", cap_mb),
        DEFAULT_FIRST_BUCKET_BYTES,
    )
    return DDPConfig(device=_single_device(device_ids, output_device), **options)


def _single_device(
    device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
) -> torch.device | None:
    check = _arguments.check
    if device_ids is not None:
        check_devices(device_ids)
    if not device_ids:
        hint = "leave output_device out; or pass the same device in device_ids"
        check.require(
            output_device is None, "output_device", output_device, "None where device_ids is None", hint
        )
        return None
    hint = "device_ids=[local_rank]; DataParallel drives several devices from one process"
    check.require(len(device_ids) == 1, "device_ids", device_ids, "one device: each process drives one", hint)
    device = as_device(device_ids[0])
    if output_device is not None:
        is_same = as_device(output_device, "output_device") == device
        check.require(is_same, "output_device", output_device, f"{device}, as device_ids")
    return device


def _check_later(arguments: Mapping[str, Any]) -> None:
    """Accept arguments of the installed torch that this class does not know, if they have torch's default.

    Code that passes torch's defaults explicitly must run with any torch. Any other value must raise, and not
    be ignored silently.
    """
    known = inspect.signature(TorchDDP.__init__).parameters
    for name, value in arguments.items():
        if name not in known:
            close = difflib.get_close_matches(name, [*known, *_OURS], n=1)
            raise ConfigTypeError(
                f"DistributedDataParallel() got an unexpected keyword argument '{name}'",
                expected="the arguments of torch's class, and Paceline's own",
                got=f"{name}={show(value)}",
                hint=f"did you mean {close[0]}?" if close else "help(DistributedDataParallel) lists them",
                argument=name,
            )
        default = known[name].default
        if value is not default and value != default:
            raise ConfigError(
                f"DistributedDataParallel: torch {torch.__version__} has an argument that Paceline does not "
                "know.",
                expected=f"{name}={default!r}, torch's default",
                got=f"{name}={show(value)}",
                hint="leave it out; or use a Paceline that is as new as this torch",
            )
