"""The arguments of `DataParallel`, Paddle's and torch's, checked and made one frozen object.

The one idea: an argument is honoured, or refused with a sentence; none is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from paceline.arguments import show
from paceline.errors import ConfigError
from paceline.reducer.arguments import MIB, WrapperArguments

_arguments = WrapperArguments("DataParallel")

HARMLESS: Mapping[str, Sequence[Any]] = {
    # Values that ask for nothing.
    # `check_reduction`: what torch once checked, Paceline always checks.
    # `batched_grad_copy`: how gradients are copied changes no result.
    "dim": (0,),
    "check_reduction": (False, True),
    "batched_grad_copy": (False, True),
    "mixed_precision": (None,),
}

_INSTEAD = {
    "mixed_precision": "paddle.amp trains in 16 bits, on GPUs; paceline.paddle.compression averages so",
}


@dataclass(frozen=True)
class DataParallelConfig:
    """What a wrapped model was asked to do.

    Attributes:
        bucket_cap_bytes: Largest bucket.
        first_bucket_bytes: Largest first bucket.
        bucket_caps_bytes: Largest first, second, ... bucket, used instead of both, if there are any.
        init_sync: Broadcast rank 0's parameters (and buffers) when wrapping.
        init_sync_buffers: Buffers and running statistics too.
        broadcast_buffers: Give every rank rank 0's buffers after each synchronised backward.
        buffers: What is done with buffers whose name matches a pattern.
        gradients_in_arena: Gradients live in the memory where they are averaged.
        skip_unused: Don't send buckets that no rank used in the pass before.
        allow_unused: A parameter without a gradient contributes 0.
        static_graph: The same parameters are unused in every pass, or it raises.
        weight: Of this rank's gradients; a function computes it from forward's arguments.
        nonfinite: What to do about infinities and NaNs: "warn" once, "raise", or "ignore".
        reduce_through: "memory" that the ranks share, the "group", or the better one ("auto").
        devices: What device_ids and output_device name, if they name any.
        timeout_s: Seconds to wait for the slowest rank; None: the group's own time-out.
        warn_after_s: Seconds after which a late rank is named in a warning; None: the default.
        check_replicas_every: Compare replicas after so many passes; None: where there is a reason; 0: never.
    """

    bucket_cap_bytes: int
    first_bucket_bytes: int
    bucket_caps_bytes: tuple[int, ...]
    init_sync: bool
    init_sync_buffers: bool
    broadcast_buffers: bool
    buffers: Mapping[str, str]
    gradients_in_arena: bool
    skip_unused: bool
    allow_unused: bool
    static_graph: bool
    weight: float | Callable[..., Any] | None
    nonfinite: str
    reduce_through: str
    devices: Mapping[str, Any]
    timeout_s: float | None
    warn_after_s: float | None
    check_replicas_every: int | None
    # Whether parameters that no rank uses are let be. Yes, as in Paddle: nothing can differ.
    allow_nobodys: ClassVar[bool] = True

    def agreed_options(self) -> dict[str, str]:
        """The options that must be the same on all ranks, or their collectives would not match."""
        return {
            "bucket_cap_mb or comm_buffer_size": str(self.bucket_cap_bytes / MIB),
            "last_comm_buffer_size": str(self.first_bucket_bytes / MIB),
            "bucket_cap_mb_list": str([cap / MIB for cap in self.bucket_caps_bytes]),
            "init_sync": str(self.init_sync),
            "broadcast_buffers": f"{self.broadcast_buffers}, {self.init_sync_buffers} at wrap",
            "buffers": str(dict(self.buffers)),
            "gradient_as_bucket_view": str(self.gradients_in_arena),
            "find_unused_parameters": "any" if self.static_graph else str(self.allow_unused),
            "static_graph": str(self.static_graph),
            "skip_all_reduce_unused_params": str(self.skip_unused),
            "nonfinite": self.nonfinite,
            "reduce_through": self.reduce_through,
            "check_replicas_every": str(self.check_replicas_every),
        }

    def check_devices(self, place: Any) -> None:
        """Refuse arguments that name another device than that of the parameters.

        Raises:
            ConfigError: One does.
        """
        for name, device in self.devices.items():
            if not _names(device, place):
                raise ConfigError(
                    f"DataParallel: {name} names a device that the parameters are not on.",
                    expected=f"{place}, or None",
                    got=f"{name}={device!r}",
                    hint=f"leave {name} out, or call paddle.set_device() before the model is built",
                )


def make_config(
    *,
    comm_buffer_size: float,
    last_comm_buffer_size: float,
    bucket_cap_mb: float | None,
    device_ids: Sequence[Any] | None,
    output_device: Any,
    bucket_cap_mb_list: Sequence[float] | None,
    **others: Any,  # those of SHARED_NAMES; `ManagedTensors` looks at any others that are not in HARMLESS
) -> DataParallelConfig:
    """Check the constructor's arguments; see `DataParallel` for what they mean.

    Raises:
        ConfigError: An argument has a value that is not supported or makes no sense.
    """
    for name in HARMLESS:
        _check_harmless(name, others[name])
    if bucket_cap_mb is None:
        cap_bytes = _arguments.mebibytes("comm_buffer_size", comm_buffer_size)
    else:
        cap_bytes = _arguments.mebibytes("bucket_cap_mb", bucket_cap_mb)
    last_bytes = _arguments.mebibytes("last_comm_buffer_size", last_comm_buffer_size)
    caps_bytes = _arguments.caps(bucket_cap_mb_list)
    cap_bytes = max(caps_bytes, default=cap_bytes)
    return DataParallelConfig(
        bucket_cap_bytes=cap_bytes,
        first_bucket_bytes=min(cap_bytes, last_bytes),
        bucket_caps_bytes=caps_bytes,
        devices=_named_devices(device_ids, output_device),
        **_arguments.shared(others),
    )


def _check_harmless(name: str, value: Any) -> None:
    """Refuse a value that asks for something that there is not."""
    allowed = HARMLESS[name]
    if True in allowed:
        _arguments.check.flag(name, value)
    elif value is not allowed[0] and not (isinstance(value, Real) and value == allowed[0]):
        raise ConfigError(
            f"DataParallel: {name} is not supported.",
            expected=f"{name}={allowed[0]!r}",
            got=f"{name}={show(value)}",
            hint=_INSTEAD.get(name, f"leave {name} out"),
            argument=name,
        )


def _named_devices(device_ids: Sequence[Any] | None, output_device: Any) -> dict[str, Any]:
    """Each process drives one device."""
    if device_ids is not None and not isinstance(device_ids, (list, tuple)):
        hint = f"device_ids=[{device_ids!r}]"
        raise _arguments.check.refuse("device_ids", device_ids, "a list of one device", hint, is_type=True)
    is_single, hint = not device_ids or len(device_ids) == 1, "leave device_ids out"
    _arguments.check.require(is_single, "device_ids", device_ids, "one device: each process drives one", hint)
    named = {"device_ids": device_ids[0] if device_ids else None, "output_device": output_device}
    return {name: device for name, device in named.items() if device is not None}


def _names(device: Any, place: Any) -> bool:
    """Whether it means that place; a number is that of a GPU."""
    if isinstance(device, int):
        return bool(place.is_gpu_place() and place.gpu_device_id() == device)
    spelled = str(device).lower().removeprefix("place(").removesuffix(")")
    return spelled in (str(place).lower().removeprefix("place(").removesuffix(")"),) or (
        spelled == "gpu" and bool(place.is_gpu_place())
    )
