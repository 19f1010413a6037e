"""Finds the rank of a sampler's process, and the number of ranks.

Arguments come first; then torch.distributed, if it is loaded and initialised (looked up, never imported);
then the variables of the launcher, such as Paddle's.
"""

from __future__ import annotations

import sys
from typing import Any

from paceline.arguments import Arguments
from paceline.env import read_rank_environment


def find_rank(name: str, num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Number of ranks and rank of a sampler called `name`."""
    check = Arguments(name)
    hint = "leave num_replicas and rank out where the launcher's are right"
    if num_replicas is not None:
        num_replicas = check.whole("num_replicas", num_replicas, least=1, hint=hint)
    if rank is not None:
        most = None if num_replicas is None else num_replicas - 1
        rank = check.whole("rank", rank, least=0, most=most, hint=hint)
    if num_replicas is None or rank is None:
        group = _torch_group()
        if group is not None:
            num_replicas = group.get_world_size() if num_replicas is None else num_replicas
            rank = group.get_rank() if rank is None else rank
        else:
            place = read_rank_environment(rank=rank, world_size=num_replicas, needs_address=False)
            num_replicas, rank = place.world_size, place.rank
    return num_replicas, check.whole("rank", rank, least=0, most=num_replicas - 1, hint=hint)


def _torch_group() -> Any:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def loader_worker() -> tuple[int, int]:
    """Which worker of a torch or Paddle DataLoader this process is, and of how many; (0, 1) outside."""
    for framework, path in (("torch", ("utils", "data")), ("paddle", ("io",))):
        module: Any = sys.modules.get(framework)
        for name in path:
            module = getattr(module, name, None)
        info = module.get_worker_info() if module is not None else None
        if info is not None:
            return int(info.id), int(info.num_workers)
    return 0, 1
