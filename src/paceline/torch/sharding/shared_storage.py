"""torch parameters in memory that the ranks of a host share, and `share()`, for inference.

Only the `.data` of each parameter is replaced.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from paceline.arguments import Arguments
from paceline.reducer.model_agreement import ModelDescription, check_agreement, reporting_to_peers
from paceline.sharding import shared_parameters
from paceline.sharding.move_to_shared_memory import share_to_read
from paceline.sharding.shared_parameters import check_whole
from paceline.torch.communicator.find_peers import find_peers, known_exchange
from paceline.torch.model.arguments import check_materialised, checked_module
from paceline.torch.model.parameters import ManagedTensors
from paceline.torch.ops import OPS

if TYPE_CHECKING:
    from paceline.collectives.group import Group

_Module = TypeVar("_Module", bound=nn.Module)
SharedStorage = shared_parameters.SharedStorage[torch.Tensor]


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def check_before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """See `torch.nn.Module.register_state_dict_pre_hook`."""
    check_whole(f"{type(module).__name__}.state_dict", module.parameters())


def share(
    module: _Module,
    process_group: dist.ProcessGroup | Group | None = None,
    *,
    timeout_s: float | timedelta | None = None,
) -> _Module:
    """Keep one copy of a model for all ranks of a host, for inference; returns the same module.

    Collective: every rank passes a model of the same structure, and afterwards all ranks have rank 0's
    parameters and buffers, which are in memory once. They are read-only: a write in place raises ConfigError
    and is undone, so call `eval()` on models whose forward changes buffers (BatchNorm). The memory is freed
    when the last process that holds the model ends, even if rank 0 has ended before. A forked child reads the
    same copy. `copy.deepcopy(module)` gives a process a model of its own.

    Args:
        module: A model on the CPU.
        process_group: A process group of torch, or a `paceline.Group`, of ranks of one host. None: torch's
            default group, or a group formed from the environment that `paceline run` has set.
        timeout_s: Seconds to wait for the slowest rank, or a timedelta; None: the group's own time-out.

    Raises:
        ConfigError: The ranks are on several hosts, or a parameter can't be shared; says which and why.
        ModelMismatchError: The ranks have different models; names the first difference.
        RegionError: There is not enough memory; says how much there is and how much is needed.

    Example:
        Four processes of `paceline run -n 4 serve.py`, and one model of 2 GB in the memory of the machine:

        >>> model = paceline.torch.share(load_model()).eval()
        >>> with torch.inference_mode():
        ...     answer = model(request)
    """
    with reporting_to_peers(lambda: known_exchange(process_group, None)):
        checked_module("share", module)
        check_materialised("share", module)
        seconds = Arguments("share").optional_seconds("timeout_s", timeout_s)
        tensors = ManagedTensors(module)
        peers = find_peers(process_group, None, seconds, None)
    parameters, buffers = tensors.describe()
    if peers.world_size > 1:
        check_agreement(ModelDescription(parameters, buffers, {}), peers.exchange, peers.timeout_s)
    shared: dict[str, torch.Tensor] = dict(tensors.all_parameters)
    shared |= {name: buffer for name, buffer in module.named_buffers() if name in tensors.buffers}
    share_to_read("share", module, shared, peers, OPS)
    return module
