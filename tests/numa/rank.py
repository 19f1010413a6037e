"""One rank checks that its memory is on the NUMA node of its CPUs. Needs only numpy.

It asks the kernel for each page (`move_pages` without a target). Each rank checks shared memory for itself,
so that another rank sees pages that one rank has not touched.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np

import paceline
from paceline.collectives.whole_exchange import WholeExchange
from paceline.launch.topology import read_machine
from paceline.rendezvous.messages import gather_objects
from paceline.rendezvous.model_memory import share_model_memory

MOVE_PAGES = {"x86_64": 279, "aarch64": 239}[os.uname().machine]
PAGE_BYTES = os.sysconf("SC_PAGESIZE")
MODEL_BYTES = 7 << 20  # only one and seven ranks get whole MiB of it
DEADLINE_S = 300  # an emulated processor is slow


def nodes_of(address: int, nbytes: int) -> set[int]:
    """The NUMA nodes of pages that this process has read or written; a negative errno for any other."""
    first = address // PAGE_BYTES * PAGE_BYTES
    count = -(-(address + nbytes - first) // PAGE_BYTES)
    pages = (ctypes.c_void_p * count)(*range(first, first + count * PAGE_BYTES, PAGE_BYTES))
    nodes = (ctypes.c_int * count)()
    failed = ctypes.CDLL(None).syscall(MOVE_PAGES, 0, ctypes.c_ulong(count), pages, None, nodes, 0)
    assert failed == 0
    return set(nodes)


def main() -> None:
    """Raise unless all memory lies where it should."""
    group = paceline.init(timeout_s=DEADLINE_S)
    bound_to = {cpu.node for cpu in read_machine().cpus}
    assert len(bound_to) == 1, f"rank {group.rank} is on the nodes {bound_to}"
    exchange = WholeExchange(group._core)
    node_of_rank = [each["node"] for each in gather_objects(exchange, {"node": min(bound_to)}, DEADLINE_S)]
    assert len(set(node_of_rank)) == 2, node_of_rank
    assert sorted(node_of_rank) == node_of_rank, node_of_rank

    # Gradients lie in such arrays.
    array = np.asarray(group.allocate(1 << 20, np.float32))
    group.all_reduce(array)  # chunks of it are written by all ranks
    assert not array.any()  # reads every page
    found = nodes_of(array.ctypes.data, array.nbytes)
    assert found == bound_to, f"the array of rank {group.rank}, which is on {bound_to}, lies on {found}"

    memory = share_model_memory(exchange, range(group.world_size), MODEL_BYTES, timeout_s=DEADLINE_S)
    values = np.frombuffer((ctypes.c_byte * MODEL_BYTES).from_address(memory.values), np.uint8)
    assert not values.any()
    for rank, node in enumerate(node_of_rank):
        begin, end = (memory.nbytes // PAGE_BYTES * share // group.world_size for share in (rank, rank + 1))
        found = nodes_of(memory.values + begin * PAGE_BYTES, (end - begin) * PAGE_BYTES)
        assert found == {node}, f"the share of rank {rank}, which is on node {node}, lies on {found}"
    group.barrier()
    if group.rank == 0:
        print(f"{group.world_size} ranks on the nodes {node_of_rank}: all memory on the node of its rank")


if __name__ == "__main__":
    main()
