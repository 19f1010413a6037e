"""`ShardedOptimizer`: an optimizer whose step and state are split over the ranks.

This file is the optimizer that users hold; `paceline.sharding.sharded_steps` makes its steps.
"""

# mypy: disable-error-code="misc"
# Paddle's class is Any to mypy

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import paddle

from paceline.arguments import Arguments
from paceline.ddp.wrapped_model import hide_inherited
from paceline.ddp.wrapper_arguments import REDUCE_THROUGH
from paceline.errors import ConfigError
from paceline.paddle import internals
from paceline.paddle.communicator.connect import connect
from paceline.paddle.communicator.find_peers import LonePeers, find_peers, known_exchange
from paceline.paddle.model.arguments import checked_group
from paceline.paddle.model.parameters import dtype_name
from paceline.paddle.ops import OPS
from paceline.paddle.sharding.optimizer_steps import PaddlePart, kind_of, slots_of
from paceline.paddle.sharding.param_groups import (
    check_tensors,
    copy_options,
    copy_settings,
    make_own,
    make_whole,
    maker_of_trials,
    spelled_options,
)
from paceline.paddle.sharding.piece_parameters import PaddleShards
from paceline.paddle.sharding.state_names import LoadedState, make_state, named, remembered
from paceline.reducer.backward.models_sharing_parameters import registry
from paceline.reducer.model_agreement import reporting_to_peers
from paceline.rendezvous.messages import gather_objects
from paceline.sharding.journal_layout import Slot, blocks_of
from paceline.sharding.optimizer_arguments import OWNER, as_entries, check_class, no_journal
from paceline.sharding.optimizer_kind import Kind, checked_kind
from paceline.sharding.partial_steps import partial_steps
from paceline.sharding.sharded_steps import MAKING, JournalPlan, ShardedSteps

_Found = TypeVar("_Found")
_OF_ALL_PARAMETERS = ("_parameter_list", "_param_groups", "_grad_clip", "_default_dict")


class ShardedOptimizer(ShardedSteps[paddle.Tensor], paddle.optimizer.Optimizer):
    """An optimizer sharded over the ranks: each rank updates a shard of the parameters, and holds its state.

    With N ranks, each holds an N-th of the optimizer's state, and makes an N-th of its step. Then the ranks
    exchange the updated parameters, through shared memory if they are on one host. For a model that is
    wrapped with `share_parameters=True` nothing has to be copied: each rank writes its shard for all ranks.
    The methods are those of Paddle's optimizers. On every rank, gradients, learning rate and clip are those
    of all parameters.

    If an optimizer updates every element independently (SGD, Momentum, Adam and its relatives, RMSProp, ...:
    trial steps on small tensors show this), parameters are cut anywhere, so that the shards have the same
    size. Parameters then have the same bits as with the unsharded optimizer. For other optimizers (Lamb, ...)
    each rank gets whole parameters, balanced by size.

    Collective: the constructor, step(), minimize() and consolidate_state_dict(), on all ranks and in the same
    order. Before anything is written, step() compares the hyperparameters of all ranks, and which parameters
    have gradients. The gradients themselves must be the same on all ranks, as after a backward of
    `DataParallel`.

    Args:
        parameters: Parameters, or dicts of them and their options, as for any optimizer of Paddle; the same
            on all ranks, and all on one device.
        optimizer_class: The optimizer: `paddle.optimizer.AdamW`. Not LBFGS, nor another optimizer whose
            update of a parameter depends on other parameters.
        group: A group of paddle.distributed, or a `paceline.Group`. None: the default group of
            paddle.distributed, or, if it is not initialised, one formed from the launcher's environment.
        reduce_through: How ranks exchange updated parameters: through "memory" that they share, over the
            "group" of paddle.distributed, or "auto", the better of the two.
        timeout_s: Seconds to wait for the slowest rank, or a timedelta; None: the `timeout_s` of the wrapper
            of these parameters, or else the group's own time-out.
        journal: Keep the state in memory that all ranks share, so that the surviving ranks complete the shard
            of a rank that is lost during a step. For parameters that the ranks of one host share, and
            optimizers that update every element independently.
        defaults: Arguments of the optimizer: `learning_rate=1e-3, grad_clip=...`.

    Raises:
        ConfigError: An argument is not supported; the message says which and why.
        ModelMismatchError: The ranks passed different parameters or arguments; the message names the first
            difference.

    Attributes:
        optim: The optimizer of this rank's shard. Its parameters are views, and its state is the shard's.
        optims: All optimizers of this rank's shard. With a journal there is one for each block of 1 MiB, and
            `optim` is the first; without a journal, there is one.
        rank: The rank of this process.
        world_size: Number of ranks.

    Example:
        With two ranks, each of which has wrapped the same model:

        >>> optimizer = ShardedOptimizer(model.parameters(), paddle.optimizer.AdamW, learning_rate=1e-3)
        >>> model(batch).sum().backward()
        >>> optimizer.step()   # rank 0 updates one half, rank 1 the other; now both have all of it
        >>> optimizer.clear_grad()
    """

    _shards: PaddleShards

    def __init__(
        self,
        parameters: Any,
        optimizer_class: type[Any],
        group: Any = None,
        *,
        reduce_through: str = "auto",
        timeout_s: float | timedelta | None = None,
        journal: bool = False,
        **defaults: Any,
    ) -> None:
        # Paddle's constructor is not called: its attributes are in the optimizers `_whole` and `optim`.
        with reporting_to_peers(lambda: known_exchange(group), MAKING):
            check = Arguments(OWNER)
            limit_s = check.optional_seconds("timeout_s", timeout_s)
            reduce_through = check.choice("reduce_through", reduce_through, REDUCE_THROUGH)
            check.flag("journal", journal)
            check_class(optimizer_class, paddle.optimizer.Optimizer, "Paddle's", "paddle.optimizer.AdamW")
            checked_group(OWNER, group)
            whole = make_whole(
                optimizer_class, as_entries("parameters", parameters, paddle.Tensor, "parameters"), defaults
            )
            groups = internals.groups_of(whole)
            everything = [parameter for each in groups for parameter in each["params"]]
            check_tensors(everything)
            limit_s = registry.timeout_of(everything) if limit_s is None else limit_s
            peers = find_peers(group, limit_s, owner=OWNER) or LonePeers()
            self._begin(peers, optimizer_class, reduce_through, journal)
            kinds = [Kind.PARAMETERS] * len(everything)
            if self.world_size > 1:
                kinds = _kinds_of(whole, defaults)
            if self._keeps_journal and Kind.PARAMETERS in kinds:
                raise no_journal(f"{optimizer_class.__name__}, which gets whole parameters")
        self._defaults = defaults
        self._clips = internals.clips_gradients(whole)
        options = {
            "parameters": str([len(each["params"]) for each in groups]),
            "cut": str([kind.value for kind in kinds]),
            **{name: str(value) for name, value in spelled_options(whole).items()},
        }
        # Not by their names, which differ on a rank that has made another model before.
        self._agree(OPS, [f"parameter {number}" for number in range(len(everything))], everything, options)
        own = {"names": [parameter.name for parameter in everything]}
        names = list(gather_objects(peers.exchange, own, peers.timeout_s)[0]["names"])
        self._start(
            PaddleShards(self.rank, self.world_size),
            connect,
            bool(everything[0].place.is_cpu_place()),
            lambda: spelled_options(whole),
            lambda: {name: repr(value) for name, value in spelled_options(whole).items()},
        )
        self._deal(everything, names, kinds)
        self._part = self._make_part(whole, self._blocks_of(self.rank))
        self.optims = self._part.optimizers
        for each in self.optims:
            self._shards.count_updates_of(each)
        self.optim = self.optims[0]
        self._whole = whole
        self._shards.publish_owners()

    def _blocks_of(self, rank: int) -> Sequence[Sequence[int]]:
        shards = self._shards
        if not self._keeps_journal:
            return [shards.own]
        return blocks_of(shards.pieces, shards.itemsizes(), self.world_size)[rank] or [[]]

    def _make_part(self, whole: Any, blocks: Sequence[Sequence[int]]) -> PaddlePart:
        shards, ends = self._shards, list[int]()
        for group in internals.groups_of(whole):
            ends.append((ends[-1] if ends else 0) + len(group["params"]))
        optimizers = []
        for block in blocks:
            by_group: list[list[paddle.Tensor]] = [[] for _ in ends]
            for index in block:
                by_group[bisect_right(ends, shards.pieces[index].parameter)].append(shards.tensors[index])
            optimizers.append(make_own(whole, by_group, self._defaults))
        return PaddlePart(shards.tensors, blocks, optimizers)

    # --- a step ---

    @internals.untranslated
    def step(self) -> None:
        """Make one step of all parameters. Collective: blocks until every rank has updated its shard.

        With two ranks, rank 0 updates the first half of all elements and rank 1 the second; afterwards both
        have all of them.

        Raises:
            ConfigError: A gradient is sparse, or a parameter has been replaced, on some rank; or the replicas
                train on their own, because the model was wrapped with `local_sgd`. Nothing was written.
            UnusedParameterError: A parameter has a gradient on some ranks only. Nothing was written.
            MismatchError: The ranks have different hyperparameters, or call different methods. Nothing was
                written.
            Exception: An exception of the optimizer. If it is raised on all ranks before they write, nothing
                was written, and the next step can be made.
            PeerLostError, DeadlineError: A rank died or is late. If this happens in the middle of a step,
                some parameters may be updated and others not, and no further step is made before a state is
                loaded.
        """
        with paddle.no_grad():
            self._make_step({})

    def _step_own(self, gradients: Sequence[Any] | None, kwargs: Mapping[str, Any]) -> None:
        assert gradients is not None
        self._shards.lend_gradients(self._clipped(gradients) if self._clips else gradients)
        for own in self.optims:
            copy_options(self._whole, own)
        if self._journal is None:
            self.optim.step()
        else:
            self._journal.run(self._part)

    def _plan_step(self, gradients: Sequence[Any]) -> JournalPlan[paddle.Tensor] | None:
        to_make = super()._plan_step(gradients)
        if self._clips and self._are_scattered(gradients):
            raise ConfigError(
                f"{OWNER}: grad_clip needs whole gradients, and this rank has a part of each.",
                seen='reduce="scatter"',
                hint="model.clip_grad_norm_(max_norm) before the step, which knows the norm of all parts; or "
                'reduce="mean"',
            )
        return to_make

    # --- the journal ---

    def _slots(self) -> list[list[Slot]]:
        return _found_by_trials(self._whole, self._defaults, slots_of)

    def _own_part(self, kwargs: Mapping[str, Any]) -> PaddlePart:
        return self._part

    @contextmanager
    def _part_of(
        self, rank: int, gradients: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[PaddlePart]:
        shards = self._shards
        numbers = shards.numbers_of(rank)
        shards.make_parameters(numbers)
        part = self._make_part(self._whole, self._blocks_of(rank))
        for made in part.optimizers:
            copy_settings(self._whole, made)
            copy_options(self._whole, made)
        shards.lend_gradients(gradients, numbers)
        try:
            yield part
        finally:
            shards.end_loans(numbers)

    def _clipped(self, gradients: Sequence[Any]) -> list[Any]:
        clipped, first = list(gradients), 0
        for group in internals.groups_of(self._whole):
            numbers = range(first, first + len(group["params"]))
            first = numbers.stop
            having = [number for number in numbers if gradients[number] is not None]
            pairs = [(self._shards.parameters[number], gradients[number]) for number in having]
            changed = internals.clip_gradients(self._whole, group, pairs)
            for number, (_, gradient) in zip(having, changed, strict=True):
                clipped[number] = gradient
        return clipped

    def minimize(
        self,
        loss: paddle.Tensor,
        startup_program: Any = None,
        parameters: Any = None,
        no_grad_set: Any = None,
    ) -> tuple[list[Any], list[tuple[paddle.Tensor, paddle.Tensor]]]:
        """Make a step, as step() does. `loss.backward()` must have been called before, as in Paddle.

        Args:
            loss: Not looked at.
            startup_program: Must be None.
            parameters: Must be None: all parameters are updated.
            no_grad_set: Must be None.

        Returns:
            An empty list, and the parameters with their gradients.
        """
        for name, value in [
            ("startup_program", startup_program),
            ("parameters", parameters),
            ("no_grad_set", no_grad_set),
        ]:
            if value is not None:
                hint = "freeze other parameters (stop_gradient=True), or give them an optimizer of their own"
                raise Arguments(f"{OWNER}.minimize").refuse(name, value, "None", hint)
        self.step()
        found = [(parameter, internals.gradient_of(parameter)) for parameter in self._shards.parameters]
        return [], [(parameter, gradient) for parameter, gradient in found if gradient is not None]

    # --- the methods of Paddle's optimizers, for all parameters ---

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Clear the gradients of all parameters, as Paddle's optimizers do."""
        self._whole.clear_grad(set_to_zero)

    clear_gradients = clear_grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`clear_grad`, under torch's name."""
        self._whole.clear_grad(set_to_zero=not set_to_none)

    def get_lr(self) -> float:
        """The learning rate."""
        return float(self._whole.get_lr())

    def set_lr(self, value: float) -> None:
        """Set the learning rate, to the same value on every rank. Not with a scheduler, as in Paddle."""
        self._whole.set_lr(value)
        for own in self.optims:
            own.set_lr(value)

    def set_lr_scheduler(self, scheduler: Any) -> None:
        """Set the scheduler of the learning rate, on every rank."""
        self._whole.set_lr_scheduler(scheduler)
        for own in self.optims:
            own.set_lr_scheduler(scheduler)

    def _set_auxiliary_var(self, key: str, value: Any) -> None:
        """Called by a GradScaler, which skips a step this way."""
        self._auxiliary_vars[key] = value  # the optimizer of this rank's shard has the same dict

    def _get_auxiliary_var(self, key: str) -> Any:
        return self._auxiliary_vars.get(key)

    def apply_gradients(self, params_grads: Any) -> Any:
        """Refused: all ranks make a step together, in step().

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"{OWNER}.apply_gradients: a step is made by all ranks together, of all parameters.",
            hint="loss.backward(), and then optimizer.step() on every rank",
        )

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, like apply_gradients().

        Raises:
            ConfigError: Always.
        """
        return self.apply_gradients(None)

    def __getattr__(self, name: str) -> Any:
        if self._is_of_whole(name):
            return getattr(self._whole, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_of_whole(name):
            object.__setattr__(self, name, value)
            return
        setattr(self._whole, name, value)
        if name not in _OF_ALL_PARAMETERS:
            for own in self.optims:
                setattr(own, name, value)
        self._clips = internals.clips_gradients(self._whole)

    def _is_of_whole(self, name: str) -> bool:
        whole = self.__dict__.get("_whole")
        return whole is not None and name in vars(whole)

    # --- state ---

    def _held(self, number: int) -> Mapping[Any, Any]:
        return remembered(self._part.optimizer_of(number), self._shards.tensors[number].name)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as last consolidated, in the format of an unsharded optimizer's `state_dict()`.

        Tensors have the names that the first optimizer of a process uses: "linear_0.w_0_moment1_0".

        Raises:
            ConfigError: The state has not been consolidated on this rank.
        """
        state = named(self._consolidated(), self._shards.parameters)
        scheduler = internals.scheduler_of(self._whole)
        if scheduler is not None:
            state["LR_Scheduler"] = scheduler.state_dict()
        return state

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the whole state of a sharded or an unsharded optimizer; each rank keeps its shard.

        Not collective, but every rank must load the same.

        Args:
            state_dict: From `state_dict()` of this class or of `optimizer_class`, or `paddle.load()`.

        Raises:
            ConfigError: The state is of other parameters, or of another optimizer.
        """
        check = Arguments(f"{OWNER}.set_state_dict")
        if not isinstance(state_dict, Mapping):
            hint = "paddle.load(path) reads one from a file"
            raise check.refuse("state_dict", state_dict, "a state_dict", hint, is_type=True)
        scheduler = internals.scheduler_of(self._whole)
        if scheduler is not None:
            is_needed = not isinstance(scheduler, paddle.optimizer.lr.LambdaDecay)
            if "LR_Scheduler" in state_dict:
                scheduler.set_state_dict(state_dict["LR_Scheduler"])
            elif is_needed:
                raise check.refuse(
                    "state_dict", state_dict, "the scheduler's state", "", got="no LR_Scheduler in it"
                )
        shards = self._shards
        loaded = LoadedState(state_dict, shards.parameters)
        for index in shards.own:
            optimizer, tensor = self._part.optimizer_of(index), shards.tensors[index]
            piece = shards.pieces[index]
            parameter = shards.parameters[piece.parameter]
            if loaded.holds(parameter):
                make_state(optimizer, tensor)
                loaded.give(optimizer, piece, tensor, parameter)
        self._note_loaded()
        # Paddle does not count the writes of a model's set_state_dict(), which may come before this one.
        partial_steps.forget(self._shards.parameters)

    set_dict = load_state_dict = set_state_dict


hide_inherited(ShardedOptimizer, paddle.optimizer.Optimizer)


def _kinds_of(whole: Any, defaults: Mapping[str, Any]) -> list[Kind]:
    def kind(make: Callable[[list[paddle.Tensor]], Any], model: paddle.Tensor) -> Kind:
        parameters = f"{dtype_name(model.dtype)} on {model.place}"
        return checked_kind(lambda: kind_of(make, model), type(whole), parameters)

    return _found_by_trials(whole, defaults, kind)


def _found_by_trials(
    whole: Any,
    defaults: Mapping[str, Any],
    find: Callable[[Callable[[list[paddle.Tensor]], Any], paddle.Tensor], _Found],
) -> list[_Found]:
    """The results of trials with small optimizers for each parameter; equal parameters share one trial."""
    found: list[_Found] = []
    known: dict[object, _Found] = {}
    for group in internals.groups_of(whole):
        for parameter in group["params"]:
            regularizer = getattr(parameter, "regularizer", None)
            key = id(group), str(parameter.dtype), type(regularizer)
            if key not in known:
                known[key] = find(maker_of_trials(whole, group, defaults, parameter), parameter)
            found.append(known[key])
    return found
