"""The reducers of one model over several hosts, one plan after the other, for both front ends."""

from __future__ import annotations

from typing import Any

from paceline.reducer.between_hosts.blocks import has_bits_of_one_host
from paceline.reducer.between_hosts.hierarchical import HierarchicalReducer, Hosts
from paceline.reducer.between_hosts.options import BetweenHosts
from paceline.reducer.between_hosts.sum_formats import ENCODINGS, CodedSums
from paceline.reducer.between_hosts.wire import PLANS
from paceline.reducer.communicator import Reduction, ReductionOptions
from paceline.reducer.plan import Plan


class HostReducers:
    """Makes the reducers of a model.

    Args:
        hosts: Who is where, and their connections.
        between_hosts: What is asked of the way between them.

    Attributes:
        bits: Which runs give gradients of the same bits; see `WrappedModel.bits`.
    """

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
        """The reducer of a plan; None: it is one for the process group alone. Collective, over all ranks.

        Args:
            plan: The same on all ranks.
            options: The same on all ranks.
            instead_of: The reduction of the plan before, whose reducer is closed first.
        """
        if instead_of is not None:
            instead_of.reducer.close()
        if options.skip_unused or not plan.buckets:
            return None
        return self.make_next(plan, self._codes)

    def make_next(self, plan: Plan, before: CodedSums | None) -> HierarchicalReducer:
        """The reducer of a plan that follows on the one before, if there was one. Collective, as above.

        Args:
            plan: The same on all ranks.
            before: The codes whose errors are taken over; None: there are none, or nobody does.
        """
        self._num_plans += 1
        generation = self._hosts.model * PLANS + self._num_plans % PLANS
        reducer = HierarchicalReducer(
            plan, self._hosts, generation, self._encoding, before, is_exact=self._is_exact
        )
        self._codes = reducer.codes
        return reducer
