"""The communicator between several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from paceline.health.peer_monitor import publisher_with_host
from paceline.reducer.between_hosts.compressed_sums import ENCODINGS, CodedSums
from paceline.reducer.between_hosts.hierarchical import HierarchicalReducer, Hosts
from paceline.reducer.between_hosts.host_sum_order import has_bits_of_one_host
from paceline.reducer.between_hosts.message_headers import PLANS
from paceline.reducer.between_hosts.options import A_HOOK, BetweenHosts
from paceline.reducer.between_hosts.routes import BUCKET_BYTES
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.communicator import (
    MOST_POINTER_BYTES,
    BesideCommunicator,
    Communicator,
    GroupCommunicator,
    Reduction,
    ReductionOptions,
)
from paceline.reducer.framework_ops import FrameworkOps
from paceline.reducer.plan import Plan

_Tensor = TypeVar("_Tensor")


class HostReducers:
    def __init__(self, hosts: Hosts, between_hosts: BetweenHosts) -> None:
        compression, self._is_exact = between_hosts.compression, between_hosts.deterministic is not None
        is_as_one_host = self._is_exact or has_bits_of_one_host(hosts.ranks)
        self.bits = "world" if is_as_one_host else "layout"
        if compression is not None:
            self.bits = "buckets"
        self._hosts = hosts
        self._encoding = None if compression is None else ENCODINGS[compression]
        self._codes: CodedSums | None = None
        self._num_plans = 0

    def make(
        self, plan: Plan, options: ReductionOptions, instead_of: Reduction[Any] | None
    ) -> HierarchicalReducer | None:
        """The reducer of a plan; None: the process group must average it. Collective, over all ranks."""
        if instead_of is not None:
            instead_of.reducer.close()
        if options.skip_unused or not plan.buckets:
            return None
        return self.make_next(plan, self._codes)

    def make_next(self, plan: Plan, before: CodedSums | None) -> HierarchicalReducer:
        """The reducer of a plan that may replace an earlier one. Collective, over all ranks."""
        self._num_plans += 1
        generation = self._hosts.model * PLANS + self._num_plans % PLANS
        reducer = HierarchicalReducer(
            plan, self._hosts, generation, self._encoding, before, is_exact=self._is_exact
        )
        self._codes = reducer.codes
        return reducer


class HostsCommunicator(BesideCommunicator[_Tensor]):
    """A `Communicator` between several hosts: gradients are summed in the memory of each host, and all else
    goes over the process group.
    """

    most_bucket_bytes: int | None = BUCKET_BYTES

    def __init__(
        self,
        communicator: GroupCommunicator[_Tensor],
        ops: FrameworkOps[_Tensor],
        hosts: Hosts,
        between_hosts: BetweenHosts,
    ) -> None:
        super().__init__(communicator)
        self._reducers = HostReducers(hosts, between_hosts)
        self.path, self.bits = "hosts", self._reducers.bits
        self.publish = publisher_with_host(hosts.group, communicator.peer_monitor)
        self._communicator, self._ops, self._between_hosts = communicator, ops, between_hosts

    def sum(self, tensor: _Tensor, timeout_s: float | None = None) -> None:
        is_exact = self._between_hosts.deterministic is not None
        (self._communicator.sum_in_order if is_exact else self._communicator.sum)(tensor, timeout_s)

    def make_reduction(
        self,
        plan: Plan,
        parameters: Sequence[_Tensor],
        options: ReductionOptions,
        instead_of: Reduction[_Tensor] | None = None,
    ) -> Reduction[_Tensor]:
        reducer = self._reducers.make(plan, options, instead_of)
        if reducer is None:
            self.path, self.bits = self._communicator.path, self._communicator.bits
            return self._communicator.make_reduction(plan, parameters, options)
        places = self._ops.places_at(plan, parameters, reducer.buffer_pointer, reducer.memory)
        adopt = None if reducer.codes is None else reducer.adopt_errors
        return Reduction(plan, places, reducer, most_pointer_bytes=MOST_POINTER_BYTES, adopt_errors=adopt)

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator[_Tensor]:
        self._between_hosts.refuse(A_HOOK)
        return self._communicator.hooked_into(self, hook, process_group)
