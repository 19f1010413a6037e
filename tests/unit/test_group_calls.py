"""Waits for a process group of torch whose tensors are on a device, when a rank is lost; without a device.

The group, its backends and works replace those of NCCL: a work that waits for a lost rank is never completed,
unless its backend is aborted.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paceline.errors import CollectiveError, DeadlineError, PeerLostError
from paceline.reducer.process_group_waits import STATUS
from paceline.torch.communicator.calls import GroupCalls
from paceline.torch.communicator.flat_buckets import ProcessGroupTransport
from paceline.torch.ddp.join import NamingJoin

WITHIN_S = 60.0


class Backend:
    """The backend of one device; aborting it ends its works."""

    def __init__(self) -> None:
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        self.is_aborted.set()


class Group:
    """A process group with a backend for each kind of device."""

    def __init__(self, **backends: Backend) -> None:
        self._backends = backends
        self._device_types = [torch.device(name) for name in backends]

    def _get_backend(self, device: torch.device) -> Backend:
        return self._backends[device.type]


class Work:
    """A call over a backend, whose ranks are all there or not."""

    def __init__(self, backend: Backend, *, is_done: bool = False) -> None:
        self._backend, self._is_done = backend, is_done
        self.waits = 0

    def is_completed(self) -> bool:
        return self._is_done or self._backend.is_aborted.is_set()

    def wait(self) -> None:
        self.waits += 1
        if self._backend.is_aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted on rank 0")


class PeerMonitor:
    """Knows of a lost rank, or of none."""

    def __init__(self, known: CollectiveError | None = None) -> None:
        self._known = known

    def lost(self) -> CollectiveError | None:
        return self._known

    def find_lost(self, within_s: float) -> CollectiveError | None:
        return self._known

    def late(self) -> None:
        """No rank is known to be late."""

    silent = late

    def publish_waiting(self) -> None:
        """No rank receives it."""

    publish_done = give_up = publish_waiting


@pytest.fixture
def calls(monkeypatch):
    """GroupCalls over a group with these backends."""

    def make(group: Group, peer_monitor: PeerMonitor, timeout_s: float = WITHIN_S) -> GroupCalls:
        monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
        ranks = SimpleNamespace(rank=0, world_size=2, timeout_s=timeout_s, warn_after_s=WITHIN_S)
        return GroupCalls(group, ranks, peer_monitor)

    return make


@pytest.mark.parametrize("on_cpu", [{}, {"cpu": Backend()}], ids=["nccl alone", "cpu:gloo,cuda:nccl"])
def test_the_end_of_a_backward_names_a_lost_rank_and_ends_what_waits_for_it_on_the_device(calls, on_cpu):
    backend = Backend()
    transport = object.__new__(ProcessGroupTransport)
    transport._calls = calls(
        Group(cuda=backend, **on_cpu),
        PeerMonitor(PeerLostError("Rank 1 of 2 on host node1 died.", lost=(1,))),
    )
    transport._reports = SimpleNamespace(begin=lambda payload: (Work(backend), list))
    wait_for_reports = transport.begin_all_gather(b"report")
    with pytest.raises(PeerLostError, match="Rank 1 of 2 on host node1 died") as caught:
        wait_for_reports()
    assert caught.value.lost == (1,)
    assert backend.is_aborted.wait(WITHIN_S)
    assert not any(each.is_aborted.is_set() for each in on_cpu.values())


def test_buckets_on_a_device_are_not_waited_for_by_the_host(calls):
    backend = Backend()
    transport = object.__new__(ProcessGroupTransport)
    transport._calls = calls(Group(cuda=backend), PeerMonitor(PeerLostError("Rank 1 died.", lost=(1,))))
    transport._are_on_streams, transport.pointers = True, ()
    work = Work(backend)
    transport._wait(work, 0)
    assert work.waits == 1 and not backend.is_aborted.is_set()


def test_a_rank_that_is_late_ends_the_wait_too(calls):
    backend = Backend()
    with pytest.raises(DeadlineError):
        calls(Group(cuda=backend), PeerMonitor(), timeout_s=0.05).wait(Work(backend), STATUS, on_host=True)
    assert backend.is_aborted.wait(WITHIN_S)


def test_the_error_of_two_ranks_on_one_gpu_advises_one_each(calls):
    """In NCCL's words, as torch 2.11 passes them on."""

    def begin() -> None:
        raise RuntimeError(
            "NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage (run with NCCL_DEBUG=WARN for details), "
            "NCCL version 2.28.9\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
            "Last error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 101c0"
        )

    with pytest.raises(CollectiveError, match="two ranks of a host use one GPU") as caught:
        calls(Group(cuda=Backend()), PeerMonitor()).begin(begin, "an exchange of facts")
    assert "set_device" in str(caught.value) and "rank 0 and rank 1" in str(caught.value)


def test_a_good_backward_and_groups_of_the_cpu_are_left_alone(calls):
    backend = Backend()
    calls(Group(cuda=backend), PeerMonitor()).wait(Work(backend, is_done=True), STATUS, on_host=True)
    assert not backend.is_aborted.is_set()
    lost = PeerMonitor(PeerLostError("Rank 1 died.", lost=(1,)))
    for devices in (("cpu",), ("cpu", "cuda")):  # gloo may serve both
        with pytest.raises(PeerLostError):
            calls(Group(**dict.fromkeys(devices, backend)), lost).wait(Work(backend), STATUS, on_host=True)
    assert not backend.is_aborted.is_set()


def test_a_rank_that_raised_in_join_is_not_back_from_waiting() -> None:
    """Otherwise the others would take it for one that computes, and blame it."""

    class Joining:
        def naming_the_lost(self):
            raise AssertionError("torch's Join makes no call after an error")

    join = NamingJoin.__new__(NamingJoin)
    join._enable = True
    join._joining = Joining()  # type: ignore[assignment]
    error = DeadlineError("late")
    join.__exit__(type(error), error, None)
