"""`ShardedOptimizer`: each rank makes a part of the optimizer's step and holds a part of its state.

This file has the class that users construct. `paceline.sharding.sharded_steps` has the steps.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from paceline.arguments import Arguments
from paceline.ddp.wrapper_arguments import REDUCE_THROUGH
from paceline.errors import ConfigError
from paceline.reducer.backward.models_sharing_parameters import registry
from paceline.reducer.model_agreement import reporting_to_peers
from paceline.rendezvous.messages import gather_objects
from paceline.sharding.journal import storage_of_all
from paceline.sharding.journal_layout import Slot
from paceline.sharding.optimizer_arguments import OWNER, no_journal
from paceline.sharding.optimizer_kind import Kind, checked_kind
from paceline.sharding.partition import CACHED_BYTES, Piece, fit_into_caches
from paceline.sharding.sharded_steps import MAKING, ShardedSteps
from paceline.sharding.shards import Shards, part_of
from paceline.sharding.shared_parameters import check_step_allowed, storages_of
from paceline.sharding.step_barriers import spell_options
from paceline.torch.communicator.connect import connect
from paceline.torch.communicator.find_peers import find_peers, known_exchange
from paceline.torch.model.inner_tensors import is_dense
from paceline.torch.ops import OPS
from paceline.torch.sharding.optimizer_steps import TorchPart, kind_of, slots_of
from paceline.torch.sharding.param_groups import (
    NO_OPTIONS,
    as_groups,
    bare_step,
    check_class,
    check_options,
    check_tensors,
    copy_options,
    filled_as,
    looked_at,
    make_optimizer,
    parameters_of,
    plain_options,
    refuse_overlap,
    with_stand_ins,
)

if TYPE_CHECKING:
    from paceline.collectives.group import Group


class ShardedOptimizer(ShardedSteps[torch.Tensor], Optimizer, Joinable):
    """An optimizer whose step is divided over the ranks: each updates its part, and holds its state.

    A drop-in for `torch.distributed.optim.ZeroRedundancyOptimizer`. With N ranks, each rank holds an N-th of
    the optimizer's state, and makes an N-th of its step. Then every rank gets the updates of the others, in
    shared memory if they are on one host. With `share_parameters=True` in the model's wrapper nothing is
    copied: each rank writes its part for all ranks. Parameters, gradients and the hyperparameters in
    `param_groups` are those of all parameters, on every rank.

    If the optimizer updates every element separately (SGD, Adam and its relatives, RMSprop, ..., also those
    of other libraries: trial steps on small tensors detect this), its parameters are split anywhere, so that
    all ranks have the same work. The parameters then have the bits of the unsharded optimizer. For other
    optimizers (Adafactor, Muon, ...) each rank gets whole parameters, balanced by size.

    Collective: the constructor, step(), consolidate_state_dict() and add_param_group(), on all ranks and in
    the same order. Before anything is written, step() compares the hyperparameters of all ranks, and which
    parameters have gradients. The gradients themselves must be the same on all ranks, as after a backward of
    `DistributedDataParallel`.

    Args:
        params: Parameters, (name, parameter) pairs or groups of them, as for any torch optimizer; the same
            on all ranks, dense, and all on the CPU or all on GPUs.
        optimizer_class: The optimizer: `torch.optim.AdamW`. Not LBFGS, or any other that evaluates the loss
            several times in a step or that updates one parameter by the values of others.
        process_group: A process group of torch or a `paceline.Group`. None: torch's default group, or, if
            torch.distributed is not initialised, a group formed from the environment that `paceline run` has
            set.
        parameters_as_bucket_view: Accepted for compatibility; it has no effect. Parameters are sent from
            their own memory, many at a time.
        overlap_with_ddp: Must be False.
        reduce_through: How updated parameters are sent: through "memory" that the ranks share, over the
            process "group", or "auto", the better one.
        timeout_s: Seconds to wait for the slowest rank, or a timedelta; None: the time-out of the wrapper of
            these parameters, if it was given one, or else the group's own.
        journal: Whether a step survives the loss of a rank: the state lies in memory of all ranks, and
            survivors complete the part of a lost rank. For parameters that the ranks of one host share, and
            optimizers that update every element separately.
        defaults: Arguments of the optimizer: `lr=1e-3`.

    Raises:
        ConfigError: An argument is not supported; says which and why.
        ModelMismatchError: The ranks passed different parameters or arguments; names the first difference.

    Attributes:
        optim: The optimizer of this rank's part. Its parameters are views, and its state is that of the part.
        process_group: torch's group; None: a `paceline.Group` connects the ranks.
        rank: The rank of this process.
        world_size: Number of ranks.

    Example:
        With two ranks, each of which has wrapped the same model:

        >>> optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> ddp(batch).sum().backward()
        >>> optimizer.step()   # rank 0 updates one half, rank 1 the other; now both have all of it
    """

    _shards: Shards[torch.Tensor]
    steps_shared_parameters = True  # see `watch_steps`: each rank writes its part, and step() synchronises

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | Group | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        reduce_through: str = "auto",
        timeout_s: float | timedelta | None = None,
        journal: bool = False,
        **defaults: Any,
    ) -> None:
        self._is_ready = False
        self._arguments = defaults
        with reporting_to_peers(lambda: known_exchange(process_group, None), MAKING):
            check = Arguments(OWNER)
            limit_s = check.optional_seconds("timeout_s", timeout_s)
            reduce_through = check.choice("reduce_through", reduce_through, REDUCE_THROUGH)
            check.flag("journal", journal)
            check.flag("parameters_as_bucket_view", parameters_as_bucket_view)
            refuse_overlap(check.flag("overlap_with_ddp", overlap_with_ddp))
            check_class(optimizer_class)
            groups = as_groups(params)
            # torch's own class fills in and checks the arguments. It gets small stand-ins, because some
            # classes create their state in the constructor.
            self._template = make_optimizer(
                optimizer_class, [with_stand_ins(group) for group in groups], defaults
            )
            filled = [
                filled_as(group, own) for group, own in zip(groups, self._template.param_groups, strict=True)
            ]
            check_options(filled)
            check_tensors([parameter for group in filled for parameter in group["params"]])
            Optimizer.__init__(self, filled, self._template.defaults)
            Joinable.__init__(self)
            limit_s = registry.timeout_of(parameters_of(self)) if limit_s is None else limit_s
            peers = find_peers(process_group, None, limit_s, None, owner=OWNER)
            self._begin(peers, optimizer_class, reduce_through, journal)
            self._kinds: dict[str, Kind] = {}
            kinds = self._kinds_of(self.param_groups)
        self.process_group = self._peers.process_group
        self._agree_on(self.param_groups, kinds)
        self._cached_bytes = CACHED_BYTES * self._most_threads()
        self._start(
            Shards(OPS, self.rank, self.world_size),
            connect,
            all(parameter.is_cpu for parameter in parameters_of(self)),
            lambda: looked_at(self.param_groups),
            lambda: spell_options(plain_options(self.param_groups)),
        )
        self._add_pieces(self.param_groups, kinds)
        own = [self._own_group(number) for number in range(len(self.param_groups))]
        self.optim = make_optimizer(optimizer_class, own, defaults)
        self._is_ready = True
        self._shards.publish_owners()

    # --- a step ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Make one step of all parameters. Collective: blocks until every rank has completed its part.

        Args:
            closure: Evaluates the model and returns the loss; called once, on every rank, before the step.
            kwargs: Passed on to the optimizer's own step().

        Returns:
            What closure returned; None without one.

        Raises:
            MismatchError: The ranks have different hyperparameters, or call different methods. Nothing was
                written.
            UnusedParameterError: A parameter has a gradient on some ranks only. Nothing was written.
            ConfigError: On some rank a gradient is sparse, or a parameter has been replaced; or the model was
                wrapped with `local_sgd`, and the ranks are on several hosts, which train on their own.
                Nothing was written.
            Exception: The error of the optimizer. If it raises on all ranks before it writes, nothing was
                written, and the next step can be made; not with `fused=True`, which does not show what it
                has written.
            PeerLostError, DeadlineError: A rank died or is late. `step_is_complete` says whether the step was
                made as a whole or not at all. If not, parameters are updated in part, and everything that
                would use them raises TornStepError until other values are loaded.

        Example:
            Rank 0 updates the first half of all elements and rank 1 the second; afterwards both hold all.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(kwargs)
        return loss

    def _step(self, kwargs: Mapping[str, Any], *, has_data: bool = True) -> None:
        has_gradient = self._make_step(kwargs, has_data=has_data)
        # Pieces are views of .data, with version counters of their own. Each rank writes to other elements,
        # but all ranks must count the same number of writes to each parameter.
        OPS.count_writes([each for each, has in zip(self._shards.parameters, has_gradient) if has])

    def _sees_writes(self) -> Callable[[], bool] | None:
        if self._journal is not None:
            return self._journal.has_written
        is_fused = any(group.get("fused") for group in self.param_groups)
        return (lambda: True) if is_fused else None  # fused kernels do not increase versions

    def _step_own(self, gradients: Sequence[torch.Tensor | None] | None, kwargs: Mapping[str, Any]) -> None:
        if gradients is not None:
            self._shards.lend_gradients(gradients)
        own = self.optim
        copy_options(self.param_groups, own.param_groups)
        lent = self._lend_scale(own)
        try:
            if self._journal is not None:
                self._journal.run(self._own_part(kwargs))
            else:
                bare_step(own)(own, **kwargs)
        finally:
            for name in lent:
                delattr(own, name)
        copy_options(own.param_groups, self.param_groups)  # some optimizers write to their groups

    def _lend_scale(self, optimizer: Optimizer) -> list[str]:
        lent = [name for name in ("grad_scale", "found_inf") if hasattr(self, name)]
        for name in lent:
            setattr(optimizer, name, getattr(self, name))
        return lent

    # --- the journal ---

    def _slots(self) -> list[list[Slot]]:
        if not all(map(is_dense, parameters_of(self))):
            raise no_journal("parameters with gaps between their elements")
        slots: list[list[Slot]] = []
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key not in NO_OPTIONS}
            by_dtype = {
                dtype: slots_of(type(self._template), options, dtype)
                for dtype in dict.fromkeys(parameter.dtype for parameter in group["params"])
            }
            slots += [by_dtype[parameter.dtype] for parameter in group["params"]]
        return slots

    def _own_part(self, kwargs: Mapping[str, Any]) -> TorchPart:
        return TorchPart(self._shards, self.optim, kwargs)

    @contextmanager
    def _part_of(self, rank: int, gradients: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[TorchPart]:
        groups = [self._own_group(number, rank) for number in range(len(self.param_groups))]
        made = make_optimizer(type(self._template), groups, self._arguments)
        copy_options(self.param_groups, made.param_groups)
        self._lend_scale(made)
        shards = self._shards
        numbers = shards.numbers_of(rank)
        shards.lend_gradients(gradients, numbers)
        try:
            yield TorchPart(shards, made, kwargs)
        finally:
            shards.end_loans(numbers)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether step() divides by the scale itself; a GradScaler reads this."""
        return bool(getattr(self.optim, "_step_supports_amp_scaling", False))

    # --- parameters ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Collective, once the optimizer is made.

        Args:
            param_group: Its parameters and their hyperparameters; the same on all ranks.

        Raises:
            ConfigError: The group is not supported; nothing was added, on any rank.
            ModelMismatchError: The ranks passed different groups; nothing was added.
        """
        if not self._is_ready:
            super().add_param_group(param_group)
            return
        self._steps.check_unbroken()
        peers = self._peers
        num_groups = len(self.param_groups)
        try:
            with reporting_to_peers(lambda: (peers.exchange, peers.timeout_s), "add a group"):
                (group,) = as_groups([param_group])
                try:
                    self._template.add_param_group(with_stand_ins(group))
                    filled = filled_as(group, self._template.param_groups[-1])
                    super().add_param_group(filled)
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"{OWNER}.add_param_group: {error}") from error
                check_options([filled])
                check_tensors([parameter for each in self.param_groups for parameter in each["params"]])
                added = self.param_groups[num_groups:]
                kinds = self._kinds_of(added)
                # All further checks of the parameters: an error after this would leave the group half added.
                for storage in storages_of(parameters_of(self)):
                    check_step_allowed(storage, OWNER, self.world_size)
                if self._journal is not None:
                    storage_of_all(parameters_of(self), self.world_size)
                    self._slots()
            self._agree_on(added, kinds)
        except BaseException:
            del self.param_groups[num_groups:], self._template.param_groups[num_groups:]
            raise
        self._add_pieces(added, kinds)
        self.optim.add_param_group(self._own_group(num_groups))
        self._shards.publish_owners()

    def _kinds_of(self, groups: Sequence[Mapping[str, Any]]) -> list[Kind]:
        kinds = []
        for group in groups:
            options = {key: value for key, value in group.items() if key not in NO_OPTIONS}
            kinds += [self._kind_of(options, parameter) for parameter in group["params"]]
        if self._keeps_journal and Kind.PARAMETERS in kinds:
            raise no_journal(f"{type(self._template).__name__}, which gets whole parameters")
        return kinds

    def _kind_of(self, options: Mapping[str, Any], parameter: torch.Tensor) -> Kind:
        # The value of a number makes no difference, only its type and whether it is 0.
        flags = {
            key: (type(value), bool(value)) if isinstance(value, (int, float)) else value
            for key, value in options.items()
        }
        described = f"{parameter.dtype} on {parameter.device}"
        key = f"{flags} {described}"
        if key not in self._kinds:
            optimizer_class = type(self._template)
            try:
                kind = checked_kind(
                    lambda: kind_of(optimizer_class, options, parameter), optimizer_class, described
                )
            except ConfigError:
                if self.world_size > 1:
                    raise
                kind = Kind.PARAMETERS
            self._kinds[key] = kind
        return self._kinds[key]

    def _agree_on(self, groups: Sequence[Mapping[str, Any]], kinds: Sequence[Kind]) -> None:
        """Collective."""
        options = {
            "params": str([len(group["params"]) for group in groups]),
            "cut": str([kind.value for kind in kinds]),
            **spell_options(plain_options(groups), len(self.param_groups) - len(groups)),
        }
        parameters = [parameter for group in groups for parameter in group["params"]]
        doing = "add a group" if self._is_ready else MAKING
        self._agree(OPS, self._names_of(groups), parameters, options, doing)

    def _most_threads(self) -> int:
        """The largest number of threads of any rank: all ranks must use the same pieces. Collective."""
        threads = torch.get_num_threads()
        if self.world_size == 1:
            return threads
        reported = gather_objects(self._peers.exchange, {"threads": threads}, self._peers.timeout_s)
        return max(int(each["threads"]) for each in reported)

    def _add_pieces(self, groups: Sequence[Mapping[str, Any]], kinds: Sequence[Kind]) -> None:
        # Pieces that fit into caches gain nothing with a fused kernel, which reads memory once, or with
        # foreach operations, each of which goes through all tensors.
        gains = [
            parameter.is_cpu and not group.get("fused") and not group.get("foreach")
            for group in groups
            for parameter in group["params"]
        ]
        is_cut = [kind is Kind.ELEMENTS and gain for kind, gain in zip(kinds, gains, strict=True)]
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._deal(
            parameters,
            self._names_of(groups),
            kinds,
            lambda pieces, extents: fit_into_caches(pieces, extents, is_cut, self._cached_bytes),
        )

    def _names_of(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        numbers = {id(group): number for number, group in enumerate(self.param_groups)}
        return [
            group["param_names"][place]
            if "param_names" in group
            else f"{place} of group {numbers[id(group)]}"
            for group in groups
            for place in range(len(group["params"]))
        ]

    def _own_group(self, number: int, rank: int | None = None) -> dict[str, Any]:
        """The group with the pieces of a rank; None: of this rank."""
        first = sum(len(group["params"]) for group in self.param_groups[:number])
        group = self.param_groups[number]
        indices = range(first, first + len(group["params"]))
        shards = self._shards
        rank = self.rank if rank is None else rank
        own = [
            tensor
            for tensor, piece in zip(shards.tensors, shards.pieces)
            if piece.rank == rank and piece.parameter in indices
        ]
        return {**{key: value for key, value in group.items() if key not in NO_OPTIONS}, "params": own}

    # --- state ---

    def _held(self, number: int) -> Mapping[Any, Any] | None:
        held: Mapping[Any, Any] | None = self.optim.state.get(self._shards.tensors[number])
        return held

    def state_dict(self) -> dict[str, Any]:
        """The whole state on the CPU, as last consolidated, in the form of an unsharded `state_dict()`.

        Raises:
            ConfigError: The state has not been consolidated on this rank.
        """
        held, parameters = self._consolidated(), self._shards.parameters
        self.state = defaultdict(dict, {parameters[index]: held[index] for index in sorted(held)})
        try:
            whole: dict[str, Any] = super().state_dict()
        finally:
            self.state = defaultdict(dict)
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the whole state of a sharded or an unsharded optimizer; each rank keeps its part.

        Not collective, but every rank must load the same state.

        Args:
            state_dict: From `state_dict()` of this class, of ZeroRedundancyOptimizer or of `optimizer_class`.

        Raises:
            ValueError: The state has other groups of parameters.
        """
        super().load_state_dict(state_dict)  # hooks, checks, groups; loads the unsharded state
        whole, self.state = self.state, defaultdict(dict)
        shards = self._shards
        numbers = {id(tensor): number for number, tensor in enumerate(parameters_of(self.optim))}
        state: dict[int, Any] = {}
        for index in shards.own:
            parameter = shards.parameters[shards.pieces[index].parameter]
            if parameter in whole:
                held = _cut(whole[parameter], shards.pieces[index], parameter)
                state[numbers[id(shards.tensors[index])]] = held
        packed = self.optim.state_dict()["param_groups"]
        groups = [
            {
                **{key: value for key, value in group.items() if key not in NO_OPTIONS},
                "params": own["params"],
            }
            for group, own in zip(self.param_groups, packed, strict=True)
        ]
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        self._note_loaded()

    # --- torch's Join ---

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """The hook that torch's `Join` calls on a rank whose data has ended, while others train.

        The rank takes part in their steps, with gradients that it gets from the first rank that has data.

        Example:
            >>> with Join([ddp, optimizer]):   # in this order
            ...     for batch in batches:      # more on rank 0 than on rank 1
            ...         ddp(batch).sum().backward()
            ...         optimizer.step()
        """
        return _SteppingHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the parameters."""
        device: torch.device = self._shards.parameters[0].device
        return device

    @property
    def join_process_group(self) -> Any:
        """torch's process group."""
        return self.process_group


class _SteppingHook(JoinHook):
    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        with torch.no_grad():
            self._optimizer._step({}, has_data=False)


def _cut(state: Mapping[Any, Any], piece: Piece, parameter: torch.Tensor) -> dict[Any, Any]:
    """The optimizer state of a piece, from the unsharded optimizer's state of its parameter.

    Example:
        With {"step": 3, "exp_avg": [1.0, 2.0, 3.0, 4.0]}, the piece of the last two elements has
        {"step": 3, "exp_avg": [3.0, 4.0]}.
    """
    is_part = {
        key: not piece.is_whole and isinstance(value, torch.Tensor) and value.shape == parameter.shape
        for key, value in state.items()
    }
    return {
        key: part_of(OPS, OPS.as_laid_out(value, parameter), piece).clone()
        if is_part[key]
        else copy.deepcopy(value)
        for key, value in state.items()
    }
