"""`DataParallel`: one process trains one model on several devices.

The work is done in `scatter` (inputs and outputs) and `replicas` (copies of the module).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.arguments import Arguments
from paceline.errors import ConfigError
from paceline.torch.data_parallel import replicas as _replicas
from paceline.torch.data_parallel import scatter as _scatter
from paceline.torch.model.arguments import as_device, check_devices, checked_module, current_accelerator

Device = int | str | torch.device

_arguments = Arguments("DataParallel")


class DataParallel(nn.DataParallel[nn.Module]):
    """Splits each batch over the devices of this process: a drop-in for `torch.nn.DataParallel`.

    Every forward copies the module to each device, gives each copy a part of the batch and joins the
    outputs. Backward adds the gradients into the module's own, in a tree, so that no device receives more
    than log2(n) of them. With one device, or none, it calls the module itself. One process per device
    (`DistributedDataParallel`) is faster: this class copies the module in every forward.

    It is a subclass of torch's class only so that code which unwraps models recognises it.

    Args:
        module: The model; its parameters and buffers are on the first device.
        device_ids: Numbers of accelerators, or devices of any kind; "cpu" twice gives two replicas on the
            CPU. None: all accelerators; without accelerators, the module itself is called on its own device.
        output_device: The device on which outputs are joined; None: the first device.
        dim: Dimension of inputs and outputs along which they are split and joined.
        loss_fn: Called on each replica as `loss_fn(output, *loss_inputs)` when the model is called with
            `loss_inputs=(...)`, so that outputs stay on their devices. It returns a mean over its part of
            the batch, or a sum if it has an attribute `reduction` of "sum"; or a pair (sum, count) for a
            mean over something else than samples, such as tokens.

    Raises:
        ConfigError: The devices are of several kinds.

    Example:
        >>> model = DataParallel(nn.Linear(4, 1), loss_fn=nn.MSELoss())   # two devices
        >>> model(torch.ones(6, 4)).shape                                 # 3 samples each
        torch.Size([6, 1])
        >>> model(x, loss_inputs=(y,)).backward()                         # only two losses were gathered
    """

    module: nn.Module
    device_ids: list[Any]
    output_device: Any

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        loss_fn: Callable[..., Any] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.module = checked_module("DataParallel", module)
        self.dim = _arguments.whole("dim", dim)
        self.loss_fn = loss_fn
        if loss_fn is not None:
            _arguments.function("loss_fn", loss_fn, "loss_fn(output, *loss_inputs)", hint="nn.MSELoss()")
        self._devices = _devices(device_ids)
        self.device_ids = [_number_or_self(device) for device in self._devices]
        if not self._devices:
            return
        kinds = sorted({device.type for device in self._devices})
        if len(kinds) > 1:
            hint = 'device_ids=["cpu", "cpu"], or several GPUs'
            raise _arguments.refuse("device_ids", device_ids, "devices of one kind", hint)
        self.src_device_obj = self._devices[0]
        self._output = (
            self.src_device_obj if output_device is None else _device(output_device, "output_device")
        )
        self.output_device = _number_or_self(self._output)
        if len(self._devices) == 1:
            self.module.to(self.src_device_obj)

    def forward(self, *inputs: Any, loss_inputs: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        """Run the module on all devices.

        Args:
            *inputs: Tensors are split along `dim`, also in containers; other objects go to every device.
            loss_inputs: Further arguments of `loss_fn` (targets), split like inputs. None: return the
                joined outputs.
            **kwargs: As inputs.

        Returns:
            The outputs, joined along `dim`; or with `loss_inputs` the loss of the whole batch, a scalar.

        Raises:
            ConfigError: The module is not on the first device; or there is no `loss_fn`.
        """
        if loss_inputs is not None:
            if not isinstance(loss_inputs, (tuple, list)):
                hint = "loss_inputs=(target,) for a single one"
                raise _arguments.refuse("loss_inputs", loss_inputs, "a tuple", hint, is_type=True)
            return self._loss(inputs, kwargs, tuple(loss_inputs))
        if not self._devices:
            return self.module(*inputs, **kwargs)
        self._check_place()
        parts, named = self.scatter(inputs, kwargs, self._devices)
        if len(self._devices) == 1:
            return self.module(*parts[0], **named[0])
        copies = self.replicate(self.module, self._devices[: len(parts)])
        return self.gather(self.parallel_apply(copies, parts, named), self._output)

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Copies of the module, one for each device; their gradients go to the module's parameters."""
        return _replicas.replicate(module, [_device(device) for device in device_ids])

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """The arguments of each replica's forward."""
        devices = [_device(device) for device in device_ids]
        return _scatter.scatter_call(inputs, kwargs or {}, devices, self.dim)

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Call the replicas at the same time."""
        return _replicas.apply_at_once(replicas, inputs, kwargs, self._devices[: len(replicas)])

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the replicas' outputs on one device."""
        return _scatter.gather(outputs, _device(output_device), self.dim)

    def _loss(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> Any:
        if self.loss_fn is None:
            raise ConfigError(
                "DataParallel: loss_inputs were passed, but there is no loss function.",
                hint="DataParallel(module, loss_fn=...)",
            )
        if not self._devices:
            return self._combine([_LossStep(self.module, self.loss_fn, targets)(*inputs, **kwargs)], [1])
        self._check_place()
        parts, named = self.scatter(inputs, kwargs, self._devices)
        ends, _ = self.scatter(targets, None, self._devices)
        if len(ends) != len(parts):
            raise ConfigError(
                "DataParallel: loss_inputs and inputs have batches of different sizes.",
                got=f"{len(parts)} parts of the inputs, {len(ends)} of loss_inputs",
            )
        is_alone = len(self._devices) == 1
        copies = [self.module] if is_alone else self.replicate(self.module, self._devices[: len(parts)])
        steps = [_LossStep(copy, self.loss_fn, end) for copy, end in zip(copies, ends)]
        losses = self.parallel_apply(steps, parts, named)
        sizes = [_batch_size((part, name, end), self.dim) for part, name, end in zip(parts, named, ends)]
        return self._combine(losses, sizes)

    def _combine(self, losses: list[Any], sizes: list[int]) -> Any:
        if isinstance(losses[0], tuple):
            total = self._sum([total for total, _ in losses])
            return total / self._sum([torch.as_tensor(count) for _, count in losses])
        if len(losses) == 1:
            return losses[0]
        if getattr(self.loss_fn, "reduction", "mean") == "sum":
            return self._sum(losses)
        if losses[0].dim() > 0:
            return self.gather(losses, self._output)
        whole = sum(sizes)
        return self._sum([loss * (size / whole) for loss, size in zip(losses, sizes)])

    def _sum(self, values: list[torch.Tensor]) -> torch.Tensor:
        output = self._output if self._devices else values[0].device
        return torch.stack([value.to(output) for value in values]).sum(0)

    def _check_place(self) -> None:
        for tensor in itertools.chain(self.module.parameters(), self.module.buffers()):
            if tensor.device != self.src_device_obj:
                raise ConfigError(
                    "DataParallel: module must have its parameters and buffers on device "
                    f"{self.src_device_obj} (device_ids[0]) but found one of them on device: {tensor.device}",
                    hint=f"call model.to('{self.src_device_obj}') before or after wrapping it",
                )


class _LossStep:
    def __init__(self, replica: nn.Module, loss_fn: Callable[..., Any], targets: tuple[Any, ...]) -> None:
        self._replica = replica
        self._loss_fn = loss_fn
        self._targets = targets

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._loss_fn(self._replica(*inputs, **kwargs), *self._targets)


def _batch_size(value: Any, dim: int) -> int:
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            return leaf.shape[dim]
    return 1


def _devices(device_ids: Sequence[Device] | None) -> list[torch.device]:
    """As in torch, numbers are those of accelerators; without any accelerator there are no devices."""
    if device_ids is None:
        # torch 2.7 raises in device_count() without an accelerator.
        count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        return [_device(number) for number in range(count)]
    check_devices(device_ids, "DataParallel")
    if not torch.accelerator.is_available() and all(isinstance(device, int) for device in device_ids):
        return []
    return [_device(device) for device in device_ids]


def _device(device: Device, name: str = "device_ids") -> torch.device:
    if isinstance(device, int) and not isinstance(device, bool):
        if device == -1:  # torch's number for the CPU
            return torch.device("cpu")
        accelerator = current_accelerator()
        if accelerator is None:
            raise ConfigError(
                f"DataParallel: there is no accelerator, so no device {device}.",
                hint='"cpu" as a device runs replicas on the CPU',
            )
        return torch.device(accelerator.type, device)
    device = as_device(device, name, "DataParallel")
    if device.type != "cpu" and device.index is None:
        return torch.device(device.type, 0)
    return torch.device("cpu") if device.type == "cpu" else device


def _number_or_self(device: torch.device) -> int | torch.device:
    return device if device.type == "cpu" else device.index
