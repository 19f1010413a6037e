"""Parameters of torch's modules in memory that the ranks of a host share: only `.data` of each changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from paceline.reducer.peers import Ranks
from paceline.sharding import moving, shared_parameters
from paceline.sharding.shared_parameters import check_whole
from paceline.torch.model.inner_tensors import is_disjoint, is_wrapper
from paceline.torch.sharding.ops import OPS

SharedStorage = shared_parameters.SharedStorage[torch.Tensor]


def refuse_strange(owner: str, module: nn.Module, tensors: Mapping[str, torch.Tensor], peers: Ranks) -> None:
    """Refuse tensors of a module that can't be shared: see `paceline.sharding.moving`. Collective."""
    rescaled = [
        (f"'{name}' has max_norm={child.max_norm}", child.weight)
        for name, child in module.named_modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None
    ]
    moving.refuse_strange(owner, tensors, _why_not_shared, rescaled, peers, OPS)


def _why_not_shared(name: str, tensor: torch.Tensor) -> str | None:
    kind = (type(tensor) if is_wrapper(tensor) else type(tensor.data)).__name__
    if kind != "Tensor" or tensor.layout is not torch.strided or tensor.is_quantized:
        return (
            f"'{name}' is no plain dense tensor: {kind}, {tensor.layout}, {tensor.dtype}\n"
            "name it in module._ddp_params_and_buffers_to_ignore; or train without sharing parameters"
        )
    if not tensor.is_cpu:
        return f"'{name}' is on {tensor.device}, and not in the memory of the host\nmodel.cpu()"
    if not is_disjoint(tensor):
        return (
            f"several elements of '{name}' lie in the same memory (strides {tensor.stride()})\n"
            "contiguous() makes a parameter of it whose elements are its own"
        )
    return None


def is_in_backward() -> bool:
    """Whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


def check_before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """See `torch.nn.Module.register_state_dict_pre_hook`.

    Raises:
        TornStepError: The parameters hold half of an optimizer's step, in which a rank was lost.
    """
    check_whole(f"{type(module).__name__}.state_dict", module.parameters())
