"""Registers the backend "paceline" with torch.distributed.

torch then calls `_create` on every rank of each group of this backend that it forms.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.collectives.formation import share
from paceline.errors import ConfigError, format_ranks
from paceline.torch.backend.other_devices import MixedProcessGroup
from paceline.torch.backend.process_group import PacelineProcessGroup
from paceline.torch.communicator.store_exchange import StoreExchange
from paceline.versions import UnsupportedVersionError

NAME = "paceline"
OLDEST = "2.7"
"""The first torch whose own code, such as its DDP, runs on a process group that is written in Python."""


def register() -> None:
    """May be called more than once."""
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        # torch 2.15 records the calls of each group whose backend is not in this set. For a group that is
        # written in Python it raises. Paceline's recorder records these calls.
        recorded: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recorded.add(NAME)


def _create(options: Any, _: Any) -> PacelineProcessGroup:
    """`options` is torch's _DistributedBackendOptions."""
    if torch.__version__ < OLDEST:
        raise UnsupportedVersionError(
            "The paceline backend does not work with this torch: its processes are killed by SIGSEGV.",
            expected=f"torch {OLDEST} or newer",
            got=f"torch {torch.__version__}",
            hint='use init_process_group("gloo"), and paceline.torch.DistributedDataParallel for the model',
        )
    timeout_s = options.timeout.total_seconds()
    scope = str(options.group_id)
    name = f"torch group {scope}"
    exchange = StoreExchange(options.store, options.group_rank, options.group_size, NAME, scope)
    memory = share(exchange, name=name, timeout_s=timeout_s)
    core = memory.of_all_ranks()
    if core is None:
        raise _several_hosts(memory.hosts)
    kind = MixedProcessGroup if torch.accelerator.is_available() else PacelineProcessGroup
    return kind(core, options.store, timeout_s)


def _several_hosts(hosts: tuple[tuple[int, ...], ...]) -> ConfigError:
    return ConfigError(
        "The paceline backend serves process groups whose ranks share one host's memory.",
        seen="; ".join(f"host {number}: {format_ranks(ranks)}" for number, ranks in enumerate(hosts)),
        likely="the job spans several machines, or containers that can't reach each other's memory",
        hint='use init_process_group("gloo") and wrap the model in paceline.torch.DistributedDataParallel, '
        "which shares memory inside each host and uses gloo between them",
        hosts=hosts,
    )
