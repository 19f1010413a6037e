"""Exchanges over torch's process groups: Gloo, and Paceline's backend."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from paceline.errors import RendezvousError
from paceline.torch.communicator.find_peers import exchange_over
from tests.harness import ranks
from tests.multiprocess.torch_groups import needs_backend, torch_group


@pytest.mark.parametrize("backend", ["gloo", pytest.param("paceline", marks=needs_backend)])
@ranks(3, group=None)
def test_every_rank_gets_the_bytes_of_all_ranks(rank, backend):
    with torch_group(rank, backend):
        exchange = exchange_over()
        assert (exchange.rank, exchange.world_size) == (rank, 3)
        assert exchange.all_gather(b"\0x" * rank, 30) == [b"", b"\0x", b"\0x\0x"]
        assert exchange.all_gather(b"", 30) == [b"", b"", b""]
        group = dist.new_group([0, 2])
        if rank != 1:
            assert exchange_over(group).all_gather(bytes([rank]), 30) == [b"\0", b"\2"]
        if rank == 0:  # rank 2 does not take part
            with pytest.raises(RendezvousError, match="gave up waiting for the other ranks"):
                exchange_over(group).all_gather(b"", 0.2)
        if rank == 1:
            with pytest.raises(RendezvousError, match="not a member"):
                exchange_over(group)
        dist.barrier()  # no rank leaves before rank 0 has raised


def test_without_a_process_group():
    with pytest.raises(RendezvousError, match="no process group yet"):
        exchange_over()
