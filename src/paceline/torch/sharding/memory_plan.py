"""`plan_memory`: computes how much memory the training of a model takes, without allocating the model.

A model on torch's device "meta" has shapes but no elements. The optimizer runs one step there to create its
state. Models and optimizers that do not support "meta" are created in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.sharding.collective_writes import lay_out
from paceline.sharding.memory_estimate import MemoryPlan, ModelSizes, plan_ways
from paceline.torch.model.inner_tensors import inner_tensors

_META = torch.device("meta")


def plan_memory(
    make_model: Callable[[], nn.Module],
    ranks: int,
    hosts: int = 1,
    optimizer_class: type[Optimizer] = torch.optim.Adam,
    **options: Any,
) -> MemoryPlan:
    """The memory that parameters, gradients and optimizer state take on each host, for each way to train.

    Nothing is measured, and no rank is needed. Not counted: activations; what each process takes without a
    model (Python and torch: some 200 MiB, of which libraries are in memory once); and, with several hosts,
    messages between them.

    Args:
        make_model: Makes the model. Called with torch's device "meta", so nothing is allocated; if it raises
            there, it is called again without it.
        ranks: Number of ranks on all hosts.
        hosts: Number of hosts, each with the same number of ranks.
        optimizer_class: The optimizer.
        options: Further arguments of the optimizer.

    Raises:
        ConfigError: No model can be made, or the number of ranks is no multiple of the number of hosts.

    Example:
        >>> plan = plan_memory(lambda: nn.Linear(1000, 1000), ranks=4)
        >>> plan.ways["paceline_shared_view"].total / plan.ways["torch_view"].total   # 28 MB of 64 MB
    """
    _check_counts(ranks, hosts)
    module, is_allocated = _make(make_model)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = {str(index): parameter.nbytes for index, parameter in enumerate(parameters)}
    sizes = ModelSizes(
        parameters=_bytes_of(module.named_parameters()),
        buffers=_bytes_of(module.named_buffers()),
        gradients=sum(gradients.values()),
        gradient_buffer=lay_out(gradients)[1],
        state=_state_bytes(parameters, optimizer_class, options),
    )
    return plan_ways(sizes, ranks, hosts, is_allocated=is_allocated)


def optimizer_named(name: str) -> type[Optimizer]:
    found = getattr(torch.optim, name, None)
    if not inspect.isclass(found) or not issubclass(found, Optimizer):
        raise ConfigError(f"torch.optim has no optimizer {name}.", hint="Adam, AdamW, SGD, ...")
    return found


def _bytes_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    return sum(part.nbytes for name, tensor in tensors for _, part in inner_tensors(name, tensor))


def _check_counts(ranks: int, hosts: int) -> None:
    if hosts < 1 or ranks < 1 or ranks % hosts:
        raise ConfigError(
            "plan_memory: every host has equally many ranks.",
            expected="a number of ranks that is a multiple of the number of hosts",
            got=f"ranks={ranks}, hosts={hosts}",
        )


def _make(make_model: Callable[[], nn.Module]) -> tuple[nn.Module, bool]:
    is_allocated = False
    try:
        with _META, torch.random.fork_rng(devices=[]):
            module = make_model()
    except Exception:  # of any kind: make_model needs values
        is_allocated = True
        module = make_model()
    if not isinstance(module, nn.Module):
        raise ConfigError("plan_memory: no model was made.", expected="a torch.nn.Module", got=repr(module))
    return module, is_allocated or any(each.device != _META for each in module.parameters())


def _state_bytes(
    parameters: list[nn.Parameter], optimizer_class: type[Optimizer], options: Mapping[str, Any]
) -> int:
    if not parameters:
        return 0
    try:
        return _stepped(
            [torch.empty_like(each, device=_META) for each in parameters], optimizer_class, options
        )
    except Exception:  # the optimizer reads values, or has no kernel for "meta"
        seen: dict[tuple[torch.Size, torch.dtype], int] = {}
        for each in parameters:
            kind = (each.shape, each.dtype)
            if kind not in seen:
                zeros = torch.zeros(each.shape, dtype=each.dtype)
                seen[kind] = _stepped([zeros], optimizer_class, options)
        return sum(seen[each.shape, each.dtype] for each in parameters)


def _stepped(
    tensors: list[torch.Tensor], optimizer_class: type[Optimizer], options: Mapping[str, Any]
) -> int:
    stand_ins = [nn.Parameter(tensor) for tensor in tensors]
    for stand_in in stand_ins:
        stand_in.grad = torch.zeros_like(stand_in)
    optimizer = optimizer_class(stand_ins, **options)
    with torch.no_grad():
        optimizer.step()
    return sum(tensor.nbytes for held in optimizer.state.values() for tensor in _tensors(held.values()))


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
