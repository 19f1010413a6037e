"""The attributes of torch's DDP objects, under torch's names.

The one idea: torch keeps in attributes what its constructor made of its arguments; here they are read from
what ours has. Others only read them, so they are properties; a test compares them with those of an object of
torch's class.
"""

# mypy: disable-error-code="override, misc"
# What torch's class keeps in attributes are properties here

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.reducer.arguments import MIB

if TYPE_CHECKING:
    from paceline.torch.model.config import DDPConfig
    from paceline.torch.model.parameters import ManagedTensors


class TorchAttributes(TorchDDP):
    """The part of `DistributedDataParallel` that has torch's attributes.

    Attributes:
        device_mesh: The argument; not there without it, as in torch.
        broadcast_bucket_size: Bytes that torch broadcasts at once when wrapping. For code that passes it on
            to torch's own functions; Paceline does not use it.
        use_side_stream_for_tensor_copies: Inputs are moved in the current stream.
    """

    module: nn.Module
    _config: DDPConfig
    _arguments: dict[str, Any]
    _tensors: ManagedTensors

    broadcast_bucket_size: ClassVar[int] = 250 * MIB
    use_side_stream_for_tensor_copies: ClassVar[bool] = False

    @property
    def device_ids(self) -> list[Any] | None:
        """The argument; None where it was empty."""
        ids = self._arguments["device_ids"]
        return list(ids) if ids else None

    @property
    def output_device(self) -> Any:
        """The argument; without it, the device of device_ids."""
        given = self._arguments["output_device"]
        return self.device_ids[0] if given is None and self.device_ids else given

    @property
    def device(self) -> torch.device:
        """Of the first parameter."""
        return self._tensors.trainable[0].device

    @property
    def device_type(self) -> str:
        """Of the parameters."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the parameters are on several devices."""
        return len({p.device for p in self._tensors.all_parameters.values()}) > 1

    @property
    def dim(self) -> int:
        """The argument."""
        return int(self._arguments["dim"])

    @property
    def static_graph(self) -> bool:
        """The argument, or whether _set_static_graph() was called."""
        return self._config.static_graph

    @property
    def find_unused_parameters(self) -> bool:
        """The argument."""
        return bool(self._arguments["find_unused_parameters"])

    @property
    def gradient_as_bucket_view(self) -> bool:
        """The argument."""
        return self._config.gradients_in_arena

    @property
    def skip_all_reduce_unused_params(self) -> bool:
        """The argument."""
        return self._config.skip_unused

    @property
    def batched_grad_copy(self) -> bool:
        """The argument."""
        return self._config.batched_copies

    @property
    def mixed_precision(self) -> Any:
        """The argument: torch's `_MixedPrecision`, or None."""
        return self._arguments["mixed_precision"]

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are broadcast after each synchronised backward."""
        return self._config.broadcast_buffers

    @property
    def forward_sync_buffers(self) -> bool:
        """As broadcast_buffers."""
        return self._config.broadcast_buffers

    @property
    def bucket_bytes_cap(self) -> int:
        """torch.compile cuts a model into graphs of so many bytes. It insists on 1 MiB at least."""
        return max(self._config.bucket_cap_bytes, MIB)

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """Of bucket_cap_mb_list, in bytes; without it, []."""
        return list(self._config.bucket_caps_bytes)

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether neither bucket_cap_mb nor bucket_cap_mb_list was passed."""
        return self._arguments["bucket_cap_mb"] is None and not self._config.bucket_caps_bytes

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of parameters and buffers that are left alone; as in torch, those that are delayed, too."""
        delayed = self._arguments["delay_all_reduce_named_params"] or ()
        return self._tensors.ignored.union(name for name, _ in delayed)

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that the module has now, but for those that are left alone."""
        return self._tensors.current_buffers()

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The same without names."""
        return list(self.named_module_buffers.values())
