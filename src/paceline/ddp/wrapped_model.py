"""The methods of a wrapped model that users call, in any framework. Mixed into each front end's module."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, cast

from paceline.arguments import Arguments
from paceline.checkpoint.checkpoint_ops import CheckpointOps
from paceline.checkpoint.training_state import Training, check_registration, collect, restore
from paceline.ddp.traced import recorded
from paceline.ddp.virtual_steps import Step, VirtualRanks, check_model, checked_steps, note_idle_cores
from paceline.ddp.wrapper_arguments import WrapperOptions
from paceline.errors import ConfigError
from paceline.health.stop_signals import stop_signals
from paceline.reducer.backward.backward_sync import BackwardSync
from paceline.reducer.backward.front_end_interface import Tensors
from paceline.reducer.backward.micro_batch_weights import as_weight
from paceline.reducer.backward.statistics import Statistics
from paceline.reducer.backward.uneven_inputs import take_over_model, take_part_until_all_finished
from paceline.reducer.between_hosts.options import A_HOOK, BetweenHosts, refuse_other_bits
from paceline.reducer.buffers import BufferSync, settle_after_wrapping
from paceline.reducer.comm_hooks import CommHook, agree_on_hook, check_is_first
from paceline.reducer.communicator import Communicator, MemoryCommunicator
from paceline.reducer.compression import Compression
from paceline.reducer.framework_ops import FrameworkOps
from paceline.reducer.local_sgd.outer_sync import (
    OuterSync,
    Warmup,
    carried_by,
    check_same_state,
    check_state,
    state_before,
    state_of_copy,
)
from paceline.reducer.local_sgd.outer_tensors import OuterTensors
from paceline.reducer.local_sgd.replica_groups import join_replica_group
from paceline.reducer.model_agreement import ModelDescription, check_agreement, reporting_to_peers
from paceline.reducer.plan import BucketLayout, bucket_layout
from paceline.reducer.sum_order import played_by
from paceline.sharding.move_to_shared_memory import move, move_out, refuse_unshareable
from paceline.sharding.partial_steps import partial_steps
from paceline.sharding.shared_parameters import SharedStorage, written

_Batch = TypeVar("_Batch")
_BackwardSync = TypeVar("_BackwardSync", bound=BackwardSync[Any])


class WrappedModel:
    """A model on one of several ranks.

    Attributes:
        _ops: The framework's operations.
        _checkpoint_ops: The framework's operations for checkpoints.
        _tensors: The model's parameters and buffers.
        _backward_sync: None: this rank is the only one, and averages nothing.
        _config: The checked arguments.
        _arguments: The arguments as they were passed, by name.
        _outer_sync: The syncs of local SGD; None: no local SGD, or it is still in its warm-up.
        _warmup: The warm-up of local SGD, in which all ranks average; None: there is none, or it is over.
        _storage: The shared storage of the parameters; None: each rank has its own parameters.
        _earlier_steps: Good backward passes of the run whose state was loaded.
        _syncs_backward: `require_backward_grad_sync`. For a backward under way, `BackwardState.is_syncing`
            counts.
        _comm_hook: The user's communication hook; None: there is none.
        _on_drop: Reports to the graphs that the wrapper is gone.
        _carried: The local SGD state of a copy that is not connected yet; None: there is none.
        _registered: The objects passed to register_state(), by name.
        _on_preemption: The callback of on_preemption(); None: there is none, or it was called.
        _virtual: The virtual ranks of its steps; None: there are none.
        _seed: The seed of the random numbers of its steps; None: there was no step yet, and no state was
            loaded.
    """

    _ops: ClassVar[FrameworkOps[Any]]
    _checkpoint_ops: ClassVar[CheckpointOps]
    _tensors: Tensors
    _backward_sync: BackwardSync[Any] | None
    _config: WrapperOptions
    _arguments: dict[str, Any]
    _outer_sync: OuterSync[Any] | None = None
    _warmup: Warmup | None = None
    _storage: SharedStorage[Any] | None = None
    _earlier_steps = 0
    _carried: Mapping[str, Any] | None = None
    _registered: Mapping[str, Any] = MappingProxyType({})
    _on_preemption: Callable[[], object] | None = None
    _syncs_backward = True
    _comm_hook: CommHook | None = None
    _on_drop: weakref.finalize[Any, Any] | None = None
    _virtual: VirtualRanks | None = None
    _seed: int | None = None

    if TYPE_CHECKING:

        @property
        def module(self) -> Any: ...

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if the next forward begins a synchronised backward; see no_sync().

        If it is changed between a forward and its backward, it decides about that backward, as no_sync()
        around the backward does.
        """
        return self._syncs_backward

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, is_syncing: bool) -> None:
        has_changed = bool(is_syncing) is not self._syncs_backward
        self._syncs_backward = bool(is_syncing)
        if has_changed and self._backward_sync is not None:
            self._backward_sync.expect_backward(is_syncing=self._syncs_backward)

    def _check_whole(self, parameters: Iterable[Any]) -> None:
        """Raise if parameters hold half of an optimizer's step, in which a rank was lost."""
        if self._storage is not None:
            self._storage.check_whole(type(self).__name__)
        if partial_steps.marks:
            partial_steps.check(type(self).__name__, parameters)

    # --- implemented by each front end ---

    @abstractmethod
    def _ranks(self) -> Any: ...

    @abstractmethod
    def _make_communicator(self, peers: Any) -> Communicator[Any]:
        """Collective."""

    @abstractmethod
    def _make_sync(self, communicator: Communicator[Any]) -> BackwardSync[Any]:
        """Collective."""

    @abstractmethod
    def _guard_model(self) -> None:
        """Make state_dict() of the model, and of its submodules, raise while a step is partial."""

    @staticmethod
    @abstractmethod
    def _is_in_backward() -> bool: ...

    # --- backward ---

    def _check_model(self, peers: Any) -> None:
        """Raise on every rank if the ranks have wrapped different models. Collective."""
        parameters, buffers = self._tensors.describe()
        options = self._config.agreed_options() | self._tensors.agreed_options()
        if self._config.local_sgd is not None:
            of_copy = self._carried is not None
            options["local SGD begins with"] = "those of a copy" if of_copy else "new parameters"
        if peers.world_size > 1:
            check_agreement(ModelDescription(parameters, buffers, options), peers.exchange, peers.timeout_s)
        if self._config.virtual_ranks is not None:
            check_model(type(self).__name__, self.module, self._ops)

    def _begin_sync(self, *, is_first: bool = True) -> Any:
        """Connect the ranks, sync the parameters, and prepare to average gradients. Collective."""
        peers, config, tensors = self._ranks(), self._config, self._tensors
        communicator = self._make_communicator(peers)
        owner = f"{type(self).__name__}(share_parameters=True)"
        is_sharing = config.share_parameters and peers.world_size > 1
        if is_sharing:
            refuse_unshareable(owner, self.module, tensors.all_parameters, peers, self._ops)
        move_out(self.module)  # this wrapper may not write to the shared storage of another one
        are_equal = config.init_sync and is_first and self._carried is None
        if are_equal:
            buffers = tensors.buffers.values() if config.init_sync_buffers else ()
            communicator.broadcast([*tensors.all_parameters.values(), *buffers])
            if buffers:
                settle_after_wrapping(tensors, communicator.world_size)
        if is_sharing:
            self._storage = move(
                owner,
                tensors.all_parameters,
                peers,
                peers.share_hosts(),
                self._ops,
                self._is_in_backward,
                are_equal=are_equal,
                allows_writing=True,
            )
        backward_sync = self._sync_over(communicator)
        if config.virtual_ranks is not None:
            self._virtual = self._play(config.virtual_ranks, backward_sync, peers)
        backward_sync.shares_parameters = self._storage is not None
        partial_steps.call_guard(self._guard_model)
        # The hooks belong to the parameters, which may outlive the wrapper and be wrapped again.
        self._on_drop = weakref.finalize(self, backward_sync.graphs.drop_wrapper)
        self._on_drop.atexit = False
        return backward_sync

    def _play(self, count: int, backward_sync: BackwardSync[Any], peers: Any) -> VirtualRanks:
        backward_sync.averages_sums = True
        find = weakref.ref(self)  # so that the wrapper can be freed, which removes the hooks

        def step() -> int:
            wrapped = find()
            return 0 if wrapped is None else wrapped._earlier_steps + wrapped.num_good_passes

        def no_sync() -> contextlib.AbstractContextManager[None]:
            wrapped = find()
            return contextlib.nullcontext() if wrapped is None else wrapped.no_sync()

        return VirtualRanks(
            owner=type(self).__name__,
            count=count,
            played=played_by(type(self).__name__, count, peers.rank, peers.world_size),
            allows_unused=self._config.allow_unused,
            buffers=self._config.virtual_buffers,
            ops=self._ops,
            checkpoint_ops=self._checkpoint_ops,
            tensors=self._tensors,
            peers=peers,
            backward_sync=backward_sync,
            local=no_sync,
            step=step,
        )

    def _begin_again(self) -> Any:
        """Replace the `BackwardSync` by a new one; no value is broadcast. Collective."""
        if self._backward_sync is not None:
            self._backward_sync.end()
        if self._on_drop is not None:
            self._on_drop.detach()
        return self._begin_sync(is_first=False)

    def _sync_to_weigh(self) -> BackwardSync[Any]:
        """The `BackwardSync`, which a single rank gets only when its micro-batches are weighed."""
        if self._backward_sync is None:
            self._backward_sync = self._begin_sync()
            self._backward_sync.sync_next_backward(self._syncs_backward)
        return self._backward_sync

    def _register_hook(
        self, chosen: CommHook, check: Callable[[Any], None], peers: Any, process_group: Any
    ) -> None:
        """Pass buckets to a communication hook from now on. Collective."""
        known = None if peers is None else (peers.exchange, peers.timeout_s)
        with reporting_to_peers(lambda: known, doing="register a hook"):
            check(chosen.call)
            check_is_first(self._comm_hook)
            self._refuse_with_local_sgd("a communication hook averages gradients over all ranks")
            refuse_other_bits(type(self).__name__, self._config.deterministic, A_HOOK)
            self._refuse_scattering("a communication hook gives every rank whole gradients")
            self._refuse_with_virtual_ranks("a communication hook adds in an order of its own")
        if known is not None and peers.world_size > 1:
            agree_on_hook(chosen, *known)
        self._sync_to_weigh().use_hook(chosen, process_group)
        self._comm_hook = chosen

    def _clip_by_known_norm(self, max_norm: Any, norm_type: float) -> float | None:
        """Scale gradients so that their norm is at most `max_norm`, if the norm is known.

        Returns:
            The norm before scaling; None: it is not known, and nothing was scaled.
        """
        backward_sync = self._backward_sync
        if backward_sync is None:
            return None
        statistics = backward_sync.statistics
        scattered = backward_sync.autograd.scattered_in_place()
        if scattered is not None:
            norm: float = scattered.clip(max_norm, norm_type, statistics.squared_norm())
            return norm
        known = statistics.known_norm() if norm_type == 2.0 else None
        if known is not None:
            # As in both frameworks: a NaN stays a NaN, and a norm that is small enough changes nothing.
            factor = max_norm / (known + 1e-6)
            if not factor >= 1.0:
                self._ops.scale([gradient for _, gradient in self._own_gradients()], factor)
        return known

    # --- public methods ---

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside this context, `backward()` accumulates local gradients without averaging.

        The backward of a forward that ran inside stays local, even if you call it outside. It is enough to
        run only the backward inside. The next synchronised backward averages all accumulated gradients.

        Example:
            >>> with model.no_sync():
            ...     loss(model(first_half)).backward()
            >>> loss(model(second_half)).backward()     # the mean over ranks of the sum of both
        """
        before = self._syncs_backward
        self._syncs_backward = False
        try:
            with contextlib.nullcontext() if self._backward_sync is None else self._backward_sync.local():
                yield
        finally:
            self._syncs_backward = before

    def weight(self, weight: Any) -> contextlib.AbstractContextManager[None]:
        """Set the weight of this rank's gradients: for each backward inside `with`, or else for the next one.

        The gradient becomes sum(w * g) / sum(w) over all ranks, and over all micro-batches of no_sync(). If
        each loss is the mean over its own tokens and w is their number, this is the gradient of the mean over
        all tokens of the step. So don't divide the loss by the number of micro-batches. Clear gradients
        before the first micro-batch, because an existing gradient counts as part of it. A rank with weight 0
        adds nothing, even if its gradients are NaN.

        In one step, either every micro-batch of a rank has a weight or none has. A rank without a weight
        weighs 1. In float16 over a process group the first weighted backward may overflow if a weight is
        large; later backward passes use the scale of the backward before.

        Paceline's SyncBatchNorm applies the weights to the gradients that it exchanges between ranks. If the
        model exchanges gradients in any other way (all_gather with gradient in a loss), the backward raises
        on every rank.

        Args:
            weight: A number, or a tensor of one: 0, or from 1e-20 to 1e20; only the ratios count.

        Raises:
            ConfigError: It is negative, NaN, out of that range, or no number.

        Example:
            Rank 0 has 3 tokens and a gradient of 1, rank 1 has 1 token and a gradient of 5:

            >>> with model.weight(num_tokens):
            ...     loss.backward()             # the gradient is (3 * 1 + 1 * 5) / 4 = 2 on both
        """
        value = as_weight(weight, f"{type(self).__name__}.weight")
        return self._sync_to_weigh().micro_batches.give(value)

    def _weight_of(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """The weight of the forward with these arguments; None: it has no weight."""
        weight = self._config.weight
        return as_weight(weight(*inputs, **kwargs)) if callable(weight) else weight

    def finish(self, after_pass: Callable[[], object] | None = None) -> None:
        """Take part in the other ranks' backward passes with weight 0 until every rank is out of data.

        Call it once on every rank, after its loop over the data. Ranks may make different numbers of steps:
        in each backward the mean is over the ranks that have data. Blocks until the last rank has called it.
        The time-out applies to each remaining step separately. Then all ranks get the last rank's
        parameters and buffers. Gradients that no_sync() has accumulated are dropped; all other gradients are
        restored to what they were before the call, and training may go on.

        Args:
            after_pass: Called after each backward of the other ranks, with the means as gradients; a
                parameter that no rank uses has none. Pass an optimizer's `step` to keep its state the same
                on all ranks.

        Example:
            Rank 0 has 3 batches and rank 1 has 5; in the last two steps the gradient is rank 1's alone:

            >>> for batch in batches:
            ...     train_step(batch)
            >>> model.finish(optimizer.step)
        """
        _check_after_backward(f"{type(self).__name__}.finish", after_pass)
        self._refuse_with_virtual_ranks("finish() goes on with some ranks only")
        if self._backward_sync is None:
            return
        if self._outer_sync is None:
            if take_part_until_all_finished(self._backward_sync, after_pass, self._is_warmup_done):
                return
            self._end_warmup()  # as the other ranks do in their next forward
        outer_sync = self._outer_sync
        assert outer_sync is not None
        outer_sync.begin_round()  # this rank may have had no data at all
        outer_sync.sync_if_due()

        def step_and_meet() -> None:
            if after_pass is not None:
                after_pass()
            outer_sync.sync_if_due()

        take_part_until_all_finished(self._backward_sync, step_and_meet)
        outer_sync.finish()

    def iterate(
        self, batches: Iterable[_Batch], after_pass: Callable[[], object] | None = None
    ) -> Iterator[_Batch]:
        """Yield the batches of a loader or sampler, and call finish() at their end.

        Leave the loop on all ranks in the same step, or on none: a `break` does not call finish().

        Args:
            batches: Any iterable; it may have another length on each rank.
            after_pass: As for finish().

        Example:
            Rank 0 has 3 batches and rank 1 has 5; rank 0 takes part in the last two steps without data:

            >>> for batch in model.iterate(loader, optimizer.step):
            ...     train_step(batch)
        """
        owner = f"{type(self).__name__}.iterate"
        _check_after_backward(owner, after_pass)
        shape = getattr(batches, "shape", None)
        is_single = isinstance(shape, (tuple, list)) and not shape  # an array or a tensor of one number
        if is_single or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
            hint = "a DataLoader, a sampler or a list"
            raise Arguments(owner).refuse("batches", batches, "something to iterate over", hint, is_type=True)
        return self._iterate(batches, after_pass)

    def _iterate(
        self, batches: Iterable[_Batch], after_pass: Callable[[], object] | None
    ) -> Iterator[_Batch]:
        for batch in batches:
            if self._backward_sync is not None:
                self._backward_sync.notes.batches += 1
            yield batch
        self.finish(after_pass)

    def steps(self, batches: Iterable[_Batch], *, seed: int = 0, threads: int = 1) -> Iterator[Step[_Batch]]:
        """Make optimizer steps with `virtual_ranks`: bit for bit the same on any number of processes.

        Iterate over each step for the micro-batches of the virtual ranks that this process plays, and run one
        backward for each. When that inner loop ends, `.grad` is the mean over all virtual ranks. Each
        micro-batch begins without gradients, with the buffers of the last step, and with random numbers of
        torch (or Paddle), numpy and Python that are derived from the seed, the step and the virtual rank;
        loading the batch uses separate random numbers. Collective: all ranks make the same number of steps.

        Args:
            batches: A loader of micro-batches: as many per step, in order, as this process plays virtual
                ranks. `paceline.data.DistributedBatchSampler` with `virtual_ranks` yields them so.
            seed: The seed of all random numbers. The step number continues over several calls.
            threads: Threads of the framework's kernels within the loop, the same for any number of processes.

        Raises:
            ConfigError: The model was wrapped without `virtual_ranks`; a loop was left, or a loader ended,
                within a step; a micro-batch had no backward; the loader has other virtual ranks.
            SkippedPassError: Another rank did not reach the end of its step.

        Example:
            >>> for step in ddp.steps(loader):
            ...     for inputs, targets in step:
            ...         loss_of(ddp(inputs), targets).backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        owner = type(self).__name__
        seed, threads = checked_steps(owner, seed, threads)
        if self._config.virtual_ranks is None:
            raise ConfigError(
                f"{owner}.steps: the model was wrapped without virtual_ranks.",
                hint=f"{owner}(model, virtual_ranks=8), for 1 to 8 processes",
            )
        peers = self._ranks()
        virtual = self._virtual
        assert virtual is not None
        if self._seed not in (None, seed):
            raise ConfigError(
                f"{owner}.steps: the run began with another seed.",
                expected=f"seed={self._seed}, as in its first steps",
                got=f"seed={seed}",
                hint="the same seed for all steps of a run; a new wrapper begins a new run",
            )
        virtual.backward_sync.settle_last()  # else ranks would wait for each other in different calls
        virtual.check_loader(batches, seed, threads)
        if peers.rank == 0 and self._seed is None:
            note_idle_cores(owner, threads, peers.world_size)
        self._seed = seed
        return virtual.steps(batches, seed, threads)

    def grad_norm(self) -> float:
        """The 2-norm of the last backward's mean gradient, over all parameters; the same on every rank.

        Costs nothing where gradients are averaged in shared memory. Call it before changing gradients.
        """
        if self._backward_sync is not None:
            return math.sqrt(self._backward_sync.statistics.squared_norm())
        return math.sqrt(sum(self._ops.squared_norm(gradient) for _, gradient in self._own_gradients()))

    def _own_gradients(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in zip(self._tensors.names, self._tensors.trainable):
            gradient = self._ops.gradient(parameter)
            if gradient is not None:
                yield name, gradient

    def nonfinite(self) -> dict[int, tuple[str, ...]]:
        """Return which gradients held an infinity or a NaN in the last backward: {rank: (parameter names)}.

        The same on every rank, and known without reading gradients again. Empty if all were finite. Over
        NCCL, without nonfinite="raise", the result may be that of an earlier backward, the last one whose
        flags have arrived from the GPU.

        Raises:
            ConfigError: Over a process group, nonfinite="ignore" disables the search.

        Example:
            After a NaN in the batch of rank 1: {1: ("head.weight", "head.bias")}.
        """
        backward_sync = self._backward_sync
        if backward_sync is None:
            names = tuple(name for name, each in self._own_gradients() if not self._ops.is_finite(each))
            return {0: names} if names else {}
        if self._outer_sync is not None:
            member = self._outer_sync.member
            return {member[rank]: names for rank, names in backward_sync.statistics.nonfinite().items()}
        if not backward_sync.statistics.looks_for_nonfinite:
            raise ConfigError(
                f'{type(self).__name__}: with nonfinite="ignore" a process group looks for none.',
                hint='pass nonfinite="warn" or "raise"',
            )
        return backward_sync.statistics.nonfinite()

    def sync_buffers(self) -> None:
        """Synchronise buffers and running statistics now, by the policies in `buffers`. Collective.

        Buffers without a policy are broadcast from rank 0, also with broadcast_buffers=False. Buffers that
        are "local" are left alone. Use it before an evaluation on all ranks, and after rank 0 alone has
        written to buffers; an evaluation on rank 0 alone does not need it.
        """
        if self._outer_sync is not None:
            self._outer_sync.buffers.sync(range(self._outer_sync.communicator.world_size), on_demand=True)
        elif self._backward_sync is not None:
            self._backward_sync.buffers.sync(range(self._backward_sync.world_size), on_demand=True)

    def sync_parameters(self) -> None:
        """Sync the replicas of local SGD now, before `every` steps are over. Collective, over all ranks.

        Call it after `optimizer.step()` when all replicas must be the same: before an evaluation or a
        checkpoint, and after the last step (`finish()` and `iterate()` do so themselves). The outer optimizer
        makes a step, unless no rank has trained since the last sync, and the next sync is `every` steps
        from here. Without `local_sgd`, and in its warm-up, replicas never differ: it does nothing.

        Raises:
            NonFiniteGradientError: Some rank's parameters are infinite or NaN; no rank changes its own.
            MismatchError: Ranks have synced a different number of times, or another rank syncs in a forward
                because it has made more steps. No rank changes its parameters.

        Example:
            Since the last sync rank 0 has moved a weight from 1.0 to 0.8 and rank 1 to 0.6; with
            `LocalSGD(every=10, outer_lr=1, outer_momentum=0, between="ranks")` both hold 0.7 after this call.
        """
        if self._outer_sync is not None:
            self._outer_sync.sync()

    def local_sgd_state_dict(self) -> dict[str, Any]:
        """The state of local SGD for a checkpoint, beside the model and the optimizer. Not collective.

        It holds copies of the parameters of the last sync and the momentum of the outer optimizer, by name
        (16-bit parameters as float32, complex ones as pairs of real numbers), and the numbers of steps, in
        all and since that sync. It is the same on all ranks, except that the steps differ if data is uneven.
        The model's own parameters are the same on all ranks only right after a sync: a checkpoint between two
        syncs has the steps of one host, and loses those of the others since the last sync. So call
        sync_parameters() before saving.

        Raises:
            ConfigError: The wrapper was made without `local_sgd`.

        Example:
            >>> ddp.sync_parameters()
            >>> torch.save({"model": ddp.module.state_dict(), "outer": ddp.local_sgd_state_dict()}, path)
        """
        self._require_local_sgd("local_sgd_state_dict")
        steps = self._earlier_steps + self.num_good_passes
        if self._carried is not None:
            return state_of_copy(steps, self._carried)
        return state_before(steps) if self._outer_sync is None else self._outer_sync.state(steps)

    def load_local_sgd_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume local SGD from the state of another run. Collective, over all ranks.

        Call it after wrapping, and load the model's parameters too, before or after this. Without this call
        the parameters of the first forward count as those of the last sync, and the momentum begins at 0.
        `every` and the outer optimizer's options are those of this wrapper.

        Args:
            state: The state from local_sgd_state_dict(), the same on all ranks.

        Raises:
            ConfigError: It is not such a state, or of another model; or there is no `local_sgd`.
            ModelMismatchError: The ranks load different states.
        """
        self._require_local_sgd("load_local_sgd_state_dict")
        state = check_state(state)
        options = self._config.local_sgd
        if self._backward_sync is not None and options is not None:
            # Before any rank changes anything, check that all agree on whether the warm-up is over and on the
            # names to load. With uneven data some hosts may have made more steps than others.
            communicator = (
                self._backward_sync.communicator
                if self._outer_sync is None
                else self._outer_sync.communicator
            )
            names = [sorted(map(str, state[part])) for part in ("parameters", "momentum")]
            check_same_state(communicator, min(state["steps"], options.warmup_steps), *names)
        self._earlier_steps = state["steps"] - self.num_good_passes
        if self._warmup is not None and options is not None:
            if state["steps"] >= options.warmup_steps:
                self._end_warmup()
            else:
                self._warmup.left = options.warmup_steps - state["steps"]
        if self._outer_sync is not None:
            self._outer_sync.load(state)
        elif self._backward_sync is None:  # a copy, which is connected later
            self._carried = carried_by(state)

    def register_state(self, name: str, obj: Any) -> None:
        """Add an object's state to training_state(). Not collective, but all ranks must register the same.

        Args:
            name: Its key in the training state.
            obj: An optimizer, a scheduler, a GradScaler, a sampler, or any other object with `state_dict()`
                and `load_state_dict()` (Paddle: `set_state_dict()`). Its state must be plain values that are
                the same on all ranks; for a sampler, this is the committed position.

        Raises:
            ConfigError: It lacks these methods, or another object has this name.

        Example:
            >>> ddp.register_state("optimizer", optimizer)
        """
        check_registration(type(self).__name__, self._registered, name, obj)
        self._registered = {**self._registered, name: obj}

    def training_state(self, to: int = 0) -> dict[str, Any]:
        """The state of the run: the model, registered objects, and each rank's random numbers. Collective.

        Call it between two steps, after the optimizer's step. It holds plain values only, so
        `torch.load(weights_only=True)` and `paddle.load` read a file of it. Its tensors are not copies but
        the trained ones: save or copy them before the next step. Gradients are not in it.

        Args:
            to: The rank that gets the state.

        Returns:
            The state, and on other ranks an empty dict.

        Raises:
            ConfigError: A state can't be saved, the wrapper was made with `local_sgd`, or the wrapper keeps
                compression errors that it has not sent yet.
            TornStepError: The parameters hold half of an optimizer's step.

        Example:
            >>> state = ddp.training_state()
            >>> if rank == 0:
            ...     torch.save(state, path)                  # with Paddle: paddle.save(state, path)
        """
        to = Arguments("training_state").whole("to", to, least=0, most=self._ranks().world_size - 1)
        return self._training_state([to])

    def _training_state(self, to: Sequence[int]) -> dict[str, Any]:
        self._check_whole(self._tensors.all_parameters.values())
        return collect(self._training(), to)

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a training_state(), bit for bit if the number of ranks is the same. Collective.

        Call it before the first step, when the model is wrapped and the same objects are registered. On
        another number of ranks everything but the random numbers is loaded, and rank 0 warns.

        Args:
            state: The state from training_state() on one rank, the same on all ranks.

        Raises:
            ConfigError: It is not a training state, or of another model or of other objects; the message
                shows what differs.

        Example:
            >>> ddp.register_state("optimizer", optimizer)
            >>> ddp.load_training_state(torch.load(path, weights_only=True))      # Paddle: paddle.load(path)
        """
        before = restore(self._training(), state)
        self._earlier_steps = before - self.num_good_passes
        if self._config.virtual_ranks is not None:
            self._seed = state.get("seed")
        partial_steps.forget(self._tensors.all_parameters.values())

    def on_preemption(self, callback: Callable[[], object]) -> None:
        """Set a callback for every rank, called when SIGTERM or SIGUSR1 asks any rank to stop.

        Not collective, but call it on all ranks. The next synchronised backward publishes the signal to all
        ranks. `callback` is called once on each rank, before its next forward, when all ranks have made the
        same number of steps. It should save, and end the process: the exit status of `sys.exit(75)` tells
        schedulers that the job can be resumed. A Checkpointer needs no callback. The program's own handlers
        of these signals are called as well.

        Args:
            callback: Called without arguments. It may be collective.

        Raises:
            ConfigError: It is not callable.

        Example:
            >>> def save_and_exit():
            ...     save("preempted.pt")
            ...     sys.exit(75)
            >>> ddp.on_preemption(save_and_exit)
        """
        if not callable(callback):
            check, hint = Arguments(f"{type(self).__name__}.on_preemption"), "a function without arguments"
            raise check.refuse("callback", callback, "something to call", hint, is_type=True)
        if self._on_preemption is None:
            stop_signals.listen()
            weakref.finalize(self, stop_signals.leave)
        self._on_preemption = callback

    @property
    def _is_stopping(self) -> bool:
        """True if all ranks know that a signal has asked one of them to stop."""
        if self._backward_sync is None:  # the only rank
            return stop_signals.received != 0
        return self._backward_sync.is_stopping

    def _call_if_preempted(self) -> None:
        if self._is_stopping and (callback := self._on_preemption) is not None:
            self._on_preemption = None
            callback()

    def _training(self) -> Training:
        peers, backward_sync = self._ranks(), self._backward_sync
        return Training(
            owner=type(self).__name__,
            variable=self._ops.names.variable,
            module=self.module,
            ops=self._checkpoint_ops,
            peers=peers,
            communicator=None if backward_sync is None else backward_sync.communicator,
            parameters=self._tensors.all_parameters,
            in_step=() if backward_sync is None else backward_sync.buffers.in_step,
            objects=self._registered,
            good_backwards=self._earlier_steps + self.num_good_passes,
            reason_against=self._reason_against_state(),
            writing=self.writing,
            virtual_ranks=self._config.virtual_ranks,
            seed=self._seed,
        )

    def _reason_against_state(self) -> ConfigError | None:
        """Why this model has no training state; None: it has one."""
        state = None if self._comm_hook is None else self._comm_hook.state
        if self._config.local_sgd is not None:
            seen = "local_sgd: between two syncs each host has parameters and an optimizer's state of its own"
            hint = (
                "sync_parameters(), then save the model and local_sgd_state_dict(); the optimizers begin anew"
            )
        elif isinstance(state, Compression) and state.error_feedback:
            seen = f"{type(state).__name__}: each rank keeps what rounding took from its gradients"
            hint = "error_feedback=False; or save state_dict()s, and lose what is kept"
        elif self._config.compress_between_hosts is not None and self.gradient_path == "hosts":
            seen = "compress_between_hosts: each host keeps what compression took from its gradients"
            hint = "leave compress_between_hosts out; or save state_dict()s, and lose what is kept"
        else:
            return None
        return ConfigError(
            f"{type(self).__name__}: a training state would not hold all that this run goes on with.",
            seen=seen,
            hint=hint,
        )

    def _check_join(self, where: str, *flags: Any) -> tuple[bool, bool, bool]:
        """Refuse join() with options under which the other ranks would need this rank's data or its steps."""
        if self._storage is not None:
            raise ConfigError(
                "join: ranks that are out of data would not take part in the steps of the others.",
                seen="share_parameters=True: all ranks of a host step together",
                hint=f"call {self._ops.names.variable}.finish(after_pass=step) on each rank when its data "
                "ends, where step() makes the optimizer's step as in the loop",
            )
        self._refuse_scattering(f"in {where} a rank without data needs the gradients of another")
        self._refuse_with_virtual_ranks(f"{where} goes on with some ranks only")
        names = "divide_by_initial_world_size", "enable", "throw_on_early_termination"
        divide, is_on, throws = map(Arguments("join").flag, names, flags)
        return divide, is_on, throws

    def _require_local_sgd(self, call: str) -> None:
        if self._config.local_sgd is None:
            raise ConfigError(
                f"{type(self).__name__}.{call}: this model was wrapped without local_sgd.",
                hint="pass local_sgd=LocalSGD(every=...) when wrapping",
            )

    def _refuse_with_local_sgd(self, what: str) -> None:
        """Refuse calls that local SGD does not support."""
        if self._config.local_sgd is not None:
            raise ConfigError(
                f"{type(self).__name__}: {what}, but with local_sgd most steps are a host's own.",
                hint="leave it out, or local_sgd",
                argument="local_sgd",
            )

    def _refuse_with_virtual_ranks(self, what: str) -> None:
        """Refuse calls that depend on the number of processes."""
        if self._config.virtual_ranks is not None:
            raise ConfigError(
                f"{type(self).__name__}: {what}, but with virtual_ranks all are in each step.",
                hint="leave it out, or virtual_ranks",
                argument="virtual_ranks",
            )

    def _refuse_scattering(self, why: str) -> None:
        """Refuse calls that need whole gradients."""
        if self._config.scatters:
            raise ConfigError(
                f'{type(self).__name__}: {why}, and reduce="scatter" gives each rank a part of each.',
                hint='reduce="mean"; to train on uneven data: finish(after_pass=step) on each rank',
                argument="reduce",
            )

    def _sync_over(self, communicator: Communicator[Any]) -> BackwardSync[Any]:
        """Make the `BackwardSync` of all ranks, or with local SGD that of this rank's replica group and the
        `OuterSync`.

        Collective, over all ranks.
        """
        options = self._config.local_sgd
        self._outer_sync = self._warmup = None
        steps = self._earlier_steps + self.num_good_passes
        if options is None or steps < options.warmup_steps:
            backward_sync = self._make_sync(communicator)
            self._warmup = None if options is None else Warmup(options.warmup_steps - steps, backward_sync)
            return backward_sync
        peers = self._ranks()
        replica_group_communicator, members = join_replica_group(
            communicator,
            peers.exchange,
            options.between,
            lambda core: MemoryCommunicator(core, self._ops),
            owner=type(self).__name__,
            on_host=self._tensors.is_on_host,
            timeout_s=peers.timeout_s,
            warn_after_s=peers.warn_after_s,
        )
        backward_sync = self._make_sync(replica_group_communicator)
        backward_sync.state.where = f"rank {communicator.rank} of {communicator.world_size}"
        tensors = OuterTensors(self._ops, self._tensors.all_names, self._tensors.all_trainable)
        buffers = BufferSync(self._tensors, communicator, self._config, self._ops)
        self._outer_sync = OuterSync(
            options, tensors, communicator, members, backward_sync, buffers, self._config
        )
        if self._carried is not None:
            self._outer_sync.go_on(self._carried)
            self._carried = None
        return backward_sync

    def _is_warmup_done(self) -> bool:
        return self._warmup is not None and self._warmup.left <= 0

    def _end_warmup(self) -> None:
        """End the warm-up: from here on the replica groups of local SGD train on their own. Collective."""
        before = self._backward_sync
        assert before is not None
        take_over_model(before, before.active)
        self._backward_sync = self._begin_again()
        self._backward_sync.good_backwards = before.good_backwards
        self._backward_sync.micro_batches.take_over(before.micro_batches)
        self._backward_sync.sync_next_backward(self._syncs_backward)

    def _begin_local_forward(self, backward_sync: _BackwardSync, *, is_training: bool) -> _BackwardSync:
        """Begin a forward with `local_sgd`; collective if replicas sync. Returns the `BackwardSync` to use
        from here on.
        """
        if self._warmup is not None and self._warmup.is_over(is_training=is_training):
            self._end_warmup()
        if self._outer_sync is not None:
            self._outer_sync.begin_forward(is_training=is_training)
        return cast("_BackwardSync", self._backward_sync or backward_sync)

    def check_replicas(self, optimizer: Any = None) -> None:
        """Raise on every rank if the model is not the same, to the bit, on all of them. Collective.

        It detects differences that averaging gradients does not show: a rank that has skipped
        `optimizer.step()`, has another learning rate, or has written to a weight. Call it between two steps,
        or pass check_replicas_every=100 to run it at the end of each hundredth backward. It reads all
        parameters once, at the speed of memory, and exchanges 8 bytes.

        It compares the parameters, and the buffers that backward synchronises. Buffers that are "local", and
        all buffers with broadcast_buffers=False, are left out.

        Args:
            optimizer: Its state and learning rates are compared too. It must not keep a different part of
                the state on each rank, as ZeroRedundancyOptimizer does.

        Raises:
            ReplicasDifferError: Names the ranks that differ from the others, and what differs first.

        Example:
            Rank 2 of 3 has skipped a step; on all ranks:

            >>> ddp.check_replicas(optimizer)
            ReplicasDifferError: Rank 2 of 3 has another model than the other ranks: parameter '0.weight' ...
        """
        is_paddles = hasattr(optimizer, "clear_grad") and hasattr(optimizer, "get_lr")
        is_optimizer = is_paddles or hasattr(optimizer, "param_groups")
        if isinstance(optimizer, type) or not (optimizer is None or is_optimizer):
            owner, hint = (
                f"{type(self).__name__}.check_replicas",
                "the one that steps this model, or None",
            )
            raise Arguments(owner).refuse("optimizer", optimizer, "an optimizer", hint, is_type=True)
        if self._backward_sync is not None:
            self._backward_sync.state.check_process()
            self._backward_sync.drift.check(optimizer)

    def bucket_layout(self) -> tuple[BucketLayout, ...]:
        """Which gradients are averaged together, and in which order: one entry per bucket. Not collective.

        Buckets are listed in the order in which a backward is expected to complete them, which is the order
        in which they are averaged; the plan is the same on every rank. The first plan assumes that gradients
        arrive in the reverse order of registration. The first synchronised backward shows the true order, and
        the buckets are planned again for it; `register_comm_hook` plans again, too. So call this after the
        first backward, for example to choose `bucket_cap_mb`.

        A parameter with sparse gradients is in no bucket: its rows are exchanged separately.

        Returns:
            Empty for a single rank, which averages nothing.

        Example:
            Two ranks hold `nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))`, wrapped with
            `bucket_cap_mb=0.0001` (104 bytes). Both see, after a backward:

            >>> for bucket in ddp.bucket_layout():
            ...     print(bucket.parameters, bucket.sizes_bytes, bucket.nbytes, bucket.dtype)
            ('1.bias', '1.weight') (8, 32) 128 float32
            ('0.bias',) (16,) 64 float32
            ('0.weight',) (64,) 64 float32
        """
        sync = self._backward_sync
        return () if sync is None else bucket_layout(sync.current_plan.reduction.plan)

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context, parameters that are shared may be changed in place.

        Collective with share_parameters=True; otherwise it does nothing, and parameters may be changed at
        any time. Until the end of the block only the rank that makes a change sees it; the others see the old
        values. At the end all ranks sync: the changes then take effect for all ranks of each host or, if any
        rank has raised, for none. Either all ranks make the same changes, as in code that was written for
        unshared parameters, or one rank of each host makes them. Within the block, each rank has private
        copies of the pages that it changes.

        Any optimizer can step here, on every rank, as it would without shared parameters.

        Raises:
            ConfigError: A backward is running.
            ReplicaError: Another rank has raised; nothing was written.
            ReplicasDifferError: Ranks have written different values; nothing was written.
            DeadlineError: A rank did not reach the end of its block; names it.

        Example:
            On two ranks; both then see weights between -1 and 1:

            >>> with model.writing(), torch.no_grad():       # with Paddle: paddle.no_grad()
            ...     for parameter in model.parameters():
            ...         parameter.clamp_(-1, 1)              # parameter.clip_(-1, 1)
        """
        return written(self._storage)

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record what all ranks do in the context, and write it as a timeline. Collective at both ends.

        The file is in Chrome's trace event format, which https://ui.perfetto.dev reads. For each rank it
        shows the forward, the backward, each bucket, waits and the ranks waited for, optimizer steps and
        batches of data loaders; the ranks of several hosts have one clock. Rank 0 writes it when all ranks
        have left the context. The last 262,144 records of each rank are kept, some thousands of backward
        passes. `paceline run --trace out.json` does the same for a whole job.

        Args:
            path: The file. The path on rank 0 is used.

        Raises:
            ConfigError: Rank 0 can't write the file; on every rank, before anything is recorded.

        Example:
            >>> with ddp.trace("step.json"):
            ...     train_step(batch)
        """
        if self._backward_sync is None:
            warnings.warn(
                f"{type(self).__name__}.trace records nothing, because a single rank averages nothing.",
                stacklevel=3,
            )
            yield
            return
        self._ops.note_steps()
        with recorded(self._backward_sync.communicator, path):
            yield

    # --- attributes that trainers read from the frameworks' own classes ---

    @property
    def device_ids(self) -> list[Any] | None:
        """The argument; None if it was empty."""
        ids = self._arguments["device_ids"]
        return list(ids) if ids else None

    @property
    def output_device(self) -> Any:
        """The argument; without it, the device of device_ids."""
        given = self._arguments["output_device"]
        return self.device_ids[0] if given is None and self.device_ids else given

    @property
    def static_graph(self) -> bool:
        """The argument; with torch, also whether _set_static_graph() was called."""
        return self._config.static_graph

    @property
    def gradient_as_bucket_view(self) -> bool:
        """The argument."""
        return self._config.gradients_in_buffer

    @property
    def broadcast_buffers(self) -> bool:
        """True if buffers are broadcast after each synchronised backward."""
        return self._config.broadcast_buffers

    def _between_hosts(self) -> BetweenHosts:
        config = self._config
        return BetweenHosts(
            owner=type(self).__name__,
            compression=config.compress_between_hosts,
            deterministic=config.deterministic,
        )

    def _warn_of_unused_compression(self, rank: int) -> None:
        value = self._config.compress_between_hosts
        path = self.gradient_path if self._outer_sync is None else self._outer_sync.communicator.path
        if value is not None and rank == 0 and path != "hosts":
            warnings.warn(
                f"{type(self).__name__}: compress_between_hosts={value!r} does nothing, because all ranks "
                "are on one host.",
                stacklevel=2,
            )

    # --- statistics ---

    @property
    def num_good_passes(self) -> int:
        """How many synchronised backward passes replaced the gradients by their mean so far; 0 for one rank.

        A backward counts when all its work is done and it is about to return. Those in `no_sync()` and those
        that raised do not count. In `finish()` and `join()`, each backward counts in which this rank took
        part without data, so that the number is the same on all ranks.

        Example:
            Two ranks have made three steps of two micro-batches, the first of each in `no_sync()`: 3 on both.
        """
        return 0 if self._backward_sync is None else self._backward_sync.good_backwards

    def stats(self) -> Statistics:
        """All statistics so far in one frozen object: which ranks waited for which, and how long each worked.

        Not collective, and free: each backward exchanges the figures of all ranks.

        Example:
            Rank 1 of two is slower; on both ranks:

            >>> ddp.stats().worked_s, ddp.stats().slow_rank
            ((0.020, 0.031), 1)
        """
        if self._backward_sync is not None:
            return replace(
                self._backward_sync.statistics.now(self._backward_sync.good_backwards), bits=self.bits
            )
        return Statistics(0, 1, 0, "nothing", self.bits, 0.0, (0.0,), (), (), (), 0, 0, {}, 0)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent waiting for the others at the end of backward, so far."""
        return 0.0 if self._backward_sync is None else self._backward_sync.statistics.waited_s

    @property
    def gradient_path(self) -> str:
        """Where gradients are averaged: "memory", "hosts", "group", or "nothing" for a single rank.

        "hosts": within each host, in its memory or, for GPUs, over a process group; then between the hosts.
        """
        return "nothing" if self._backward_sync is None else self._backward_sync.communicator.path

    @property
    def bits(self) -> str:
        """Which runs give mean gradients with the same bits, from the same gradients of each rank.

        "world": all runs with as many ranks, whatever the hosts and the bucket sizes. Always so on one host,
        and with `deterministic="world"`; on several hosts also if summing within each host and then over the
        hosts gives the bits of the sum over all ranks, for example with ranks 0 to 3 on one host and 4 to 7
        on the other.
        "layout": all runs with the same ranks on the same hosts, whatever the bucket sizes.
        "buckets": all runs with the same ranks on the same hosts, and the same bucket sizes: with
        `compress_between_hosts`, which encodes several values together.
        "engine": a process group or a communication hook sums, in an order that depends on the bucket sizes.
        Gloo gives the same bits in every run with the same ranks; NCCL does if it chooses the same algorithm.
        Within one run, all ranks always have the same bits.
        """
        if self._outer_sync is not None:
            return self._outer_sync.bits
        return "world" if self._backward_sync is None else self._backward_sync.communicator.bits


class _Hidden:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")


def hide_inherited(cls: type, framework: type, kept: Container[str] = ()) -> None:
    """Hide the names that `cls` inherits from the framework's class, except dunders and the names in `kept`.

    Names that `cls` defines itself stay.
    """
    for name in vars(framework):
        is_own = getattr(cls, name, None) is not getattr(framework, name)
        if not is_own and name not in kept and not name.startswith("__"):
            setattr(cls, name, _Hidden(name))


def _check_after_backward(owner: str, after_pass: Callable[[], object] | None) -> None:
    if after_pass is not None:
        hint = "the method itself, without a call: after_pass=optimizer.step"
        Arguments(owner).function("after_pass", after_pass, "after_pass()", hint=hint)


def checked_norms(max_norm: Any, norm_type: Any) -> tuple[Any, float]:
    check = Arguments("clip_grad_norm_")
    shape = getattr(max_norm, "shape", (0,))
    if not (hasattr(max_norm, "backward") and math.prod(shape) == 1):  # a value on a GPU is not known yet
        hint = "for example max_norm=1.0; math.inf to clip nothing"
        max_norm = check.number("max_norm", max_norm, least=0, is_finite=False, hint=hint)
    if isinstance(norm_type, str) and norm_type in ("inf", "-inf"):
        return max_norm, float(norm_type)
    hint = "norm_type=2.0; math.inf for the largest element"
    return max_norm, check.number("norm_type", norm_type, is_finite=False, hint=hint)
