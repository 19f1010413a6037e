"""Copies of a module on several devices of one process, whose gradients are summed in a tree.

A copy's parameters are outputs of `Spread`, so autograd returns their gradients to the module. `Spread` adds
them in pairs: of n devices, none receives more than log2(n) gradients. torch's DataParallel sends n - 1 to
the first device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._utils import ExceptionWrapper
from torch.autograd.function import FunctionCtx

from paceline.errors import ConfigError


def tree_rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """The (receiver, sender) pairs of each round of a tree sum; at the end 0 holds the whole sum.

    Example:
        >>> list(tree_rounds(4))
        [[(0, 1), (2, 3)], [(0, 2)]]
    """
    step = 1
    while step < count:
        yield [(place, place + step) for place in range(0, count - step, 2 * step)]
        step *= 2


class Spread(torch.autograd.Function):
    """A tensor on each of several devices; backward adds the gradients of the copies in a tree.

    Example:
        `a, b = Spread.apply((device_0, device_1), parameter)`; (a + 2 * b).sum().backward() gives 3.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, devices: tuple[torch.device, ...], tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(
            tensor.detach() if tensor.device == device else tensor.to(device, non_blocking=True)
            for device in devices
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:
        """The sum on the first device. An unused copy adds nothing."""
        sums = list(gradients)
        for pairs in tree_rounds(len(sums)):
            for receiver, sender in pairs:
                sums[receiver] = _added(sums[receiver], sums[sender])
                sums[sender] = None  # frees the memory
        return None, sums[0]


def _added(own: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if own is None or other is None:
        return other if own is None else own
    return own + other.to(own.device, non_blocking=True)


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """One copy of the module for each device; the first shares the module's buffers.

    Gradients of a copy's parameters go to the module's parameters. Writes of the first copy to buffers
    (running statistics) reach the module; those of other copies are lost, as in torch.

    Raises:
        ConfigError: A part of the module is TorchScript.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigError(
                f"DataParallel cannot replicate '{name}' for several devices: it is TorchScript.",
                hint="wrap the module that was scripted, before scripting it",
            )
    parameters = {id(p): Spread.apply(tuple(devices), p) for p in module.parameters()}  # type: ignore[no-untyped-call]
    buffers = {id(b): _copies(b, devices) for b in module.buffers()}
    copies: list[nn.Module] = []
    for number in range(len(devices)):
        parts = {part: part._replicate_for_data_parallel() for part in module.modules()}  # type: ignore[no-untyped-call]
        own = {key: versions[number] for key, versions in {**parameters, **buffers}.items()}
        for part, copy in parts.items():
            _fill(part, copy, parts, own)
        copies.append(parts[module])
    return copies


def _copies(buffer: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    # Never the same memory twice, even on one device: replicas run at the same time.
    return [buffer, *(buffer.detach().to(device, copy=True) for device in devices[1:])]


def _fill(part: nn.Module, copy: Any, parts: dict[nn.Module, Any], own: dict[int, torch.Tensor]) -> None:
    copy._former_parameters = {}
    for key, child in part._modules.items():
        copy._modules[key] = None if child is None else parts[child]
    for key, tensor in part._parameters.items():
        if tensor is None:
            copy._parameters[key] = None
            continue
        # Not a leaf, so it can't be a Parameter; torch's own modules look for it in _former_parameters.
        setattr(copy, key, own[id(tensor)])
        copy._former_parameters[key] = own[id(tensor)]
    for key, buffer in part._buffers.items():
        copy._buffers[key] = None if buffer is None else own[id(buffer)]


def apply_at_once(
    replicas: Sequence[Any],
    inputs: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    devices: Sequence[torch.device],
) -> list[Any]:
    """Call every replica in a thread of its own, and the first in the caller's thread.

    Threads have the caller's grad mode, autocast state and current streams.
    """
    outputs: list[Any] = [None] * len(replicas)
    state = _CallerState(devices)

    def run(number: int) -> None:
        try:
            with state.enter(number):
                outputs[number] = replicas[number](*inputs[number], **kwargs[number])
        except Exception:
            where = f"in replica {number} on device {devices[number]}"
            outputs[number] = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]

    threads = [
        threading.Thread(target=run, args=(number,), name=f"replica {number}")
        for number in range(1, len(replicas))
    ]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    for output in outputs:
        if isinstance(output, ExceptionWrapper):
            output.reraise()  # type: ignore[no-untyped-call]
    return outputs


class _CallerState:
    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._caches = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", *(device.type for device in devices)}
        }
        self._places = [_place(device) for device in devices]

    def enter(self, number: int) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, (dtype, enabled) in self._autocast.items():
            # A replica runs once in its thread, so an autocast cache there would never be used again.
            caches = self._caches and number == 0
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=caches))
        for context in self._places[number]:
            stack.enter_context(context())
        return stack


def _place(device: torch.device) -> list[Any]:
    if device.type == "cpu":
        return []
    backend = torch.get_device_module(device.type)
    stream = backend.current_stream(device)
    return [functools.partial(backend.device, device), functools.partial(backend.stream, stream)]
