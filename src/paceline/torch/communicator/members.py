"""The ranks that train as one in local SGD, those of a host or a single one, for a communicator."""

from __future__ import annotations

from typing import NoReturn

import torch

from paceline import _core
from paceline.collectives.whole_exchange import WholeExchange
from paceline.errors import ConfigError
from paceline.rendezvous.shared_memory import HostMemory
from paceline.torch.communicator.peers import Peers


class MemberPeers:
    """The ranks of a member, as `MemoryCommunicator` asks for them; they count from 0.

    Args:
        core: The memory that they share.
        peers: All ranks.
    """

    def __init__(self, core: _core.HostGroup, peers: Peers) -> None:
        self.rank, self.world_size = core.rank, core.world_size
        self.timeout_s, self.warn_after_s = peers.timeout_s, peers.warn_after_s
        self.exchange = WholeExchange(core)
        self._core = core

    @property
    def process_group(self) -> NoReturn:
        """There is none."""
        raise ConfigError(
            "DistributedDataParallel: local_sgd cannot average a buffer that is on a GPU.",
            hint="keep the buffers of a model on the CPU there, too; or leave local_sgd out",
            argument="local_sgd",
        )

    def broadcast(self, payload: torch.Tensor, root: int = 0) -> None:
        on_host = payload.cpu()
        self._core.broadcast(on_host.data_ptr(), on_host.numel(), root)
        if on_host is not payload:
            payload.copy_(on_host)

    def share_hosts(self) -> HostMemory:
        return HostMemory(self._core, (tuple(range(self.world_size)),))
