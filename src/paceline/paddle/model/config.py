"""Checks the arguments of `DataParallel`, Paddle's and torch's, and collects them in one frozen object.

Every argument is honoured or refused with an error; none is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from paceline.arguments import show
from paceline.ddp.wrapper_arguments import MIB, WrapperArguments, WrapperOptions
from paceline.errors import ConfigError
from paceline.paddle.model.mixed_precision import as_precision

_arguments = WrapperArguments("DataParallel")

HARMLESS: Mapping[str, Sequence[Any]] = {
    # Values that have no effect.
    # `check_reduction`: Paceline always makes the checks that torch made with it.
    # `batched_grad_copy`: how gradients are copied changes no result.
    "dim": (0,),
    "check_reduction": (False, True),
    "batched_grad_copy": (False, True),
}


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig(WrapperOptions):
    """The checked arguments of a wrapped model.

    Attributes:
        devices: The devices in device_ids and output_device, by argument; empty if there are none.
    """

    devices: Mapping[str, Any]
    # Whether a parameter that no rank uses is allowed. Yes, as in Paddle, because replicas cannot differ.
    allow_globally_unused: ClassVar[bool] = True

    def agreed_options(self) -> dict[str, str]:
        options = super().agreed_options()
        return {
            "bucket_cap_mb or comm_buffer_size": options.pop("bucket_cap_mb"),
            **options,
            "last_comm_buffer_size": str(self.first_bucket_bytes / MIB),
            "gradient_as_bucket_view": str(self.gradients_in_buffer),
        }

    def check_devices(self, place: Any) -> None:
        """Refuse arguments that name another device than the parameters' device."""
        for name, device in self.devices.items():
            if not _names(device, place):
                raise ConfigError(
                    f"DataParallel: {name} names a device that the parameters are not on.",
                    expected=f"{place}, or None",
                    got=f"{name}={show(device)}",
                    hint=f"leave {name} out, or call paddle.set_device() before the model is built",
                )


def make_config(
    *,
    comm_buffer_size: float,
    last_comm_buffer_size: float,
    bucket_cap_mb: float | None,
    device_ids: Sequence[Any] | None,
    output_device: Any,
    mixed_precision: Any,
    **others: Any,  # SHARED_NAMES and HARMLESS; `ManagedTensors` checks any others
) -> DataParallelConfig:
    """Check the constructor's arguments; see `DataParallel` for their meaning."""
    for name in HARMLESS:
        _check_harmless(name, others[name])
    if bucket_cap_mb is None:
        cap_bytes = _arguments.mebibytes("comm_buffer_size", comm_buffer_size)
    else:
        cap_bytes = _arguments.mebibytes("bucket_cap_mb", bucket_cap_mb)
    last_bytes = _arguments.mebibytes("last_comm_buffer_size", last_comm_buffer_size)
    options = _arguments.shared(others, as_precision(mixed_precision), cap_bytes, last_bytes)
    return DataParallelConfig(devices=_named_devices(device_ids, output_device), **options)


def _check_harmless(name: str, value: Any) -> None:
    allowed = HARMLESS[name]
    if True in allowed:
        _arguments.check.flag(name, value)
    elif value is not allowed[0] and not (isinstance(value, Real) and value == allowed[0]):
        raise ConfigError(
            f"DataParallel: {name} is not supported.",
            expected=f"{name}={allowed[0]!r}",
            got=f"{name}={show(value)}",
            hint=f"leave {name} out",
            argument=name,
        )


def _named_devices(device_ids: Sequence[Any] | None, output_device: Any) -> dict[str, Any]:
    """The devices that the arguments name. At most one each, because a process uses one device."""
    if device_ids is not None and not isinstance(device_ids, (list, tuple)):
        hint = f"device_ids=[{show(device_ids)}]"
        raise _arguments.check.refuse("device_ids", device_ids, "a list of one device", hint, is_type=True)
    is_single, hint = not device_ids or len(device_ids) == 1, "leave device_ids out"
    _arguments.check.require(is_single, "device_ids", device_ids, "one device: each process drives one", hint)
    named = {"device_ids": device_ids[0] if device_ids else None, "output_device": output_device}
    return {name: device for name, device in named.items() if device is not None}


def _names(device: Any, place: Any) -> bool:
    named, meant = (str(each).lower().removeprefix("place(").removesuffix(")") for each in (device, place))
    kind, _, number = meant.partition(":")
    return named == number if isinstance(device, int) else named in (kind, meant)
