"""Steps of torch's optimizers: trial steps on small tensors, and steps of one block of a journal."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from paceline.sharding import optimizer_kind
from paceline.sharding.journal import Part, slots_from
from paceline.sharding.journal_layout import Slot
from paceline.sharding.optimizer_arguments import no_journal
from paceline.sharding.optimizer_kind import Kind
from paceline.sharding.partition import CUT_ELEMENTS
from paceline.sharding.shards import Shards
from paceline.torch.sharding.param_groups import bare_step

_TRIAL_STEPS = 4


def kind_of(optimizer_class: type[Optimizer], options: Mapping[str, Any], model: torch.Tensor) -> Kind:
    """How the step of this optimizer, with these options, can be divided. Keeps torch's random state.

    Raises:
        Exception: The error of its step on such parameters, if it raises for any shape.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return optimizer_kind.kind_of(_TorchTrials(optimizer_class, options, model))


class _TorchTrials(optimizer_kind.OptimizerTrials[torch.Tensor, Optimizer]):
    def __init__(
        self, optimizer_class: type[Optimizer], options: Mapping[str, Any], model: torch.Tensor
    ) -> None:
        self._class, self._options = optimizer_class, dict(options)
        self._dtype, self._device, self.own_shape = model.dtype, model.device, tuple(model.shape)

    def tensor(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._dtype).to(self._device)

    def make(self, tensors: Sequence[torch.Tensor]) -> Optimizer:
        group = {**copy.deepcopy(self._options), "params": list(tensors)}
        return self._class([group])  # type: ignore[call-arg]

    def step(self, optimizer: Optimizer, gradients: Sequence[torch.Tensor]) -> None:
        for tensor, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
            tensor.grad = gradient.clone()
        optimizer.step()

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())

    def remembered(self, optimizer: Optimizer) -> list[Mapping[Any, Any]]:
        return list(optimizer.state.values())

    def draw_from(self, seed: int) -> None:
        torch.manual_seed(seed)


class TorchPart(Part[torch.Tensor]):
    def __init__(self, shards: Shards[torch.Tensor], optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
        self._tensors, self._optimizer, self._kwargs = shards.tensors, optimizer, kwargs
        self._step = bare_step(optimizer)
        self._groups = [(group, group["params"]) for group in optimizer.param_groups]
        self._group_of = {id(tensor): group for group, held in self._groups for tensor in held}

    def has_gradient(self, number: int) -> bool:
        return self._tensors[number].grad is not None

    def step(self, block: int, numbers: Sequence[int]) -> None:
        try:
            for group, _ in self._groups:
                group["params"] = []
            for number in numbers:
                tensor = self._tensors[number]
                self._group_of[id(tensor)]["params"].append(tensor)
            self._step(self._optimizer, **self._kwargs)
        finally:
            for group, held in self._groups:
                group["params"] = held

    def held(self, number: int) -> dict[Any, Any]:
        held: dict[Any, Any] = self._optimizer.state.get(self._tensors[number], {})
        return held

    def lay(self, number: int, key: Any, view: torch.Tensor) -> None:
        self._optimizer.state[self._tensors[number]][key] = view

    def recall(self, number: int, views: Mapping[Any, torch.Tensor]) -> None:
        self._optimizer.state[self._tensors[number]] = dict(views)


def slots_of(optimizer_class: type[Optimizer], options: Mapping[str, Any], dtype: torch.dtype) -> list[Slot]:
    """The state that an optimizer keeps for a parameter, found by trial steps on small tensors.

    Raises:
        ConfigError: Its step cannot be made in blocks, or its state has values that are not tensors.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        whole, parts = ([torch.linspace(-1, 1, size).to(dtype) for size in _SIZES] for _ in range(2))
        made = [
            optimizer_class([{**copy.deepcopy(dict(options)), "params": held}])  # type: ignore[call-arg]
            for held in (whole, list(parts))
        ]
        one, several = made
        before = {key: value for key, value in several.param_groups[0].items() if key != "params"}
        for number in range(_TRIAL_STEPS):
            for tensor, other in zip(whole, parts):
                tensor.grad = torch.linspace(1, number + 2, tensor.numel()).to(dtype)
                other.grad = tensor.grad.clone()
            one.step()
            for other in parts:
                several.param_groups[0]["params"] = [other]
                several.step()
        after = {key: value for key, value in several.param_groups[0].items() if key != "params"}
        held = several.state.get(parts[0], {})
        strange = [key for key, value in held.items() if not isinstance(value, torch.Tensor)]
        if strange or repr(before) != repr(after) or not all(map(torch.equal, whole, parts)):
            why = f"remembers {strange} in other things than tensors" if strange else "steps all at once"
            raise no_journal(f"{optimizer_class.__name__}, which {why}")
    return slots_from(held, tuple(parts[0].shape))


_SIZES = (CUT_ELEMENTS + 3, 2 * CUT_ELEMENTS)
