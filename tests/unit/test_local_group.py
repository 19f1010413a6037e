"""The process group of one host: its calls of NCCL and Gloo, and hosts without one."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.errors import ConfigError  # noqa: E402
from paceline.torch.communicator.local_group import LocalCalls, LocalGroup, check_devices  # noqa: E402

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Group:
    """A group of two ranks, for one kind of device; records its calls."""

    def __init__(self, device: torch.device, engine: str) -> None:
        self.log: list[Any] = []
        self._device_types = [torch.device(device.type)]
        self._backend = SimpleNamespace(name=lambda: engine, shutdown=lambda: self.log.append("shutdown"))

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != self._device_types[0].type:
            raise RuntimeError("no backend for it")
        return self._backend

    def allreduce(self, tensors: list[torch.Tensor]) -> None:
        self.log.append(("allreduce", tensors))

    def allgather(self, rows: list[list[torch.Tensor]], own: list[torch.Tensor]) -> None:
        self.log.append(("allgather", rows[0], own[0]))

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, options: Any) -> None:
        self.log.append(("reduce_scatter", output, source))

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor) -> None:
        self.log.append(("allgather_base", output, source))


def make_calls(device: torch.device, engine: str) -> tuple[LocalCalls, Group]:
    group: Any = Group(device, engine)
    peers: Any = SimpleNamespace(process_group=None, rank=3, world_size=4, timeout_s=30.0, warn_after_s=10.0)
    local = LocalGroup(group, engine, 1, 2, "the group of host 1")
    return LocalCalls(local, peers, None, device), group


def is_part(part: torch.Tensor, flat: torch.Tensor, first: int, count: int) -> bool:
    return part.data_ptr() == flat[first:].data_ptr() and part.numel() == count


def test_calls_over_nccl_are_in_place_and_on_streams():
    calls, group = make_calls(CUDA, "nccl")
    assert calls.is_on_streams
    flat = torch.arange(8.0)
    calls.reduce_scatter(flat, 0)
    calls.all_gather(flat, 0)
    (scatter, into, source), (gather, whole, own) = group.log
    assert (scatter, gather) == ("reduce_scatter", "allgather_base")
    assert source is flat is whole and is_part(into, flat, 4, 4) and is_part(own, flat, 4, 4)


def test_calls_over_gloo_are_those_that_show_when_they_are_complete():
    calls, group = make_calls(CPU, "gloo")
    assert not calls.is_on_streams
    flat = torch.arange(8.0)
    calls.reduce_scatter(flat, 0)
    calls.all_gather(flat, 0)
    (reduce, tensors), (gather, rows, own) = group.log
    assert (reduce, gather) == ("allreduce", "allgather") and tensors == [flat]
    assert [is_part(row, flat, first, 4) for row, first in zip(rows, (0, 4))] == [True, True]
    assert is_part(own, flat, 4, 4)


@pytest.mark.parametrize("engine", ["nccl", "gloo"])
def test_nccl_learns_that_the_process_ends(engine):
    group: Any = Group(CUDA, engine)
    LocalGroup(group, engine, 0, 2, "the group of host 0").leave()
    assert group.log == (["shutdown"] if engine == "nccl" else [])


def check(others: list[dict[str, Any]], devices: list[torch.device], engine: str = "nccl") -> dict[str, Any]:
    """The report of this rank; the others report the given values."""
    said: list[dict[str, Any]] = []

    def all_gather(payload: bytes, timeout_s: float) -> list[bytes]:
        said.append(json.loads(payload))
        return [payload, *(json.dumps(said[0] | each).encode() for each in others)]

    peers: Any = SimpleNamespace(
        process_group=Group(CUDA, engine), exchange=SimpleNamespace(all_gather=all_gather), timeout_s=1.0
    )
    check_devices(peers, [[0], [1]], devices, "DDP")
    return said[0]


def test_devices_that_are_not_averaged_are_refused():
    assert check([{}], [CUDA])["kinds"] == [["cuda", "nccl"]]
    with pytest.raises(ConfigError, match=r"rank 0 has some on cpu, cuda:0"):
        check([{"devices": ["cuda:0"]}], [CUDA, CPU])
    with pytest.raises(ConfigError, match=r"rank 1 has some on cuda:1, cuda:2"):
        check([{"devices": ["cuda:1", "cuda:2"]}], [CUDA])
    with pytest.raises(ConfigError, match=r"rank 1 has parameters on xpu, and for it xccl"):
        check([{"kinds": [["xpu", "xccl"]]}], [CUDA])
    with pytest.raises(ConfigError, match=r"rank 0 has parameters on cuda, and for it mpi"):
        check([{}], [CUDA], "mpi")
    with pytest.raises(ConfigError, match=r"rank 0 has parameters on cpu, and for it a backend unknown here"):
        check([{}], [CPU])
