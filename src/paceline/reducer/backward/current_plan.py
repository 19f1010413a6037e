"""The plan of one model's buckets, and when it is replaced.

A plan, its memory and its reducer are replaced together: after the first good backward, to follow the order
of its gradients, for a communication hook, and when owners change. Replacing is collective and never happens
within a backward. Gradients, hooks and the recording get the new plan before the old memory is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from paceline.reducer.backward.front_end_interface import FrontEnd, PlanOptions
from paceline.reducer.backward.statistics import BackwardStatistics
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.communicator import Communicator, Reduction, ReductionOptions, agree
from paceline.reducer.owners import Ranges
from paceline.reducer.plan import CappedBuckets, Plan, complete_order, has_one_order, plan_gradients


@final
class CurrentPlan:
    """The plan of one model in use, with its reduction. Its methods are collective.

    Attributes:
        communicator: Connects the ranks that train the model; a communication hook replaces it.
        reduction: The reduction of the plan in use.
        owned: Which rank gets which range of each parameter's mean; empty: all ranks get all of it.
        is_order_final: Whether the plan will no longer change to follow the order of the gradients.
    """

    def __init__(
        self,
        front_end: FrontEnd[Any],
        communicator: Communicator[Any],
        options: PlanOptions,
        statistics: BackwardStatistics,
        record_plan: Callable[[Communicator[Any], Plan], None],
    ) -> None:
        self.communicator = communicator
        self.owned: tuple[Ranges, ...] = ()
        self._tensors, self._gradients, self._autograd = (
            front_end.tensors,
            front_end.gradients,
            front_end.autograd,
        )
        self._options = options
        self._statistics, self._record_plan = statistics, record_plan
        self.reduction = self._make_reduction(self._make_plan(None), None)
        self._use_reduction()
        self.is_order_final = has_one_order(self.reduction.plan)

    def use_hook(self, hook: CommHook, process_group: Any) -> None:
        self.communicator = self.communicator.with_hook(hook, process_group)
        self._replace(self._make_plan(self.reduction.plan.order))
        self.is_order_final = self.is_order_final or has_one_order(self.reduction.plan)

    def use_owners(self, owned: tuple[Ranges, ...]) -> None:
        if owned != self.owned:
            self.owned = owned
            self._replace(self._make_plan(self.reduction.plan.order))

    def adopt_order(self, order: Sequence[int]) -> None:
        """Plan by the order in which gradients came on rank 0. Called at most once."""
        self.is_order_final = True
        agreed = agree(self.communicator, complete_order(order, len(self._tensors.names)))
        plan = self._make_plan(agreed)
        if plan != self.reduction.plan:
            self._replace(plan)

    def _replace(self, plan: Plan) -> None:
        before = self.reduction
        self._statistics.take_over()
        must_move = self._gradients.any_in_buffer or bool(before.owned)
        # If no gradient lies in the gradient buffer, it is freed first, so that there are never two.
        self.reduction = self._make_reduction(plan, None if must_move else before)
        self._use_reduction()
        if must_move:
            before.reducer.close()
        self._autograd.install()

    def _use_reduction(self) -> None:
        self._gradients.adopt(self.reduction)
        self._statistics.use(self.communicator, self.reduction)
        self._record_plan(self.communicator, self.reduction.plan)

    def _make_plan(self, order: Sequence[int] | None) -> Plan:
        whole, most = self.communicator.wants_whole_buckets, self.communicator.most_bucket_bytes
        caps = self._options if most is None else CappedBuckets(self._options, most)
        return plan_gradients(self._gradients.specs(whole=whole), caps, order, whole=whole)

    def _make_reduction(self, plan: Plan, instead_of: Reduction[Any] | None) -> Reduction[Any]:
        asked = self._options
        finite = asked.nonfinite != "ignore"
        waits = asked.nonfinite == "raise"
        options = ReductionOptions(asked.gradients_in_buffer, finite, asked.skip_unused, self.owned, waits)
        return self.communicator.make_reduction(plan, self._tensors.trainable, options, instead_of)
