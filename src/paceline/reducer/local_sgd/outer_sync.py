"""Syncs of replica groups that train on their own in between (local SGD), for every framework.

The change of the parameters since the last sync is averaged as a gradient is, by a reducer over all ranks. So
a sync has everything that a backward has: deadlines, the names of lost ranks, compression and bits between
hosts, and one outcome on all ranks. Parameters change only if the outcome is good: every rank makes the same
step of the outer optimizer, and then has the same parameters.

Words: a *replica group* (`member` in names) trains on its own: the ranks of a host, which stay equal, or one
rank. Its weight in the mean is the sum of the weights of its backward passes since the last sync.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, final

from paceline.errors import (
    ConfigError,
    MismatchError,
    ModelMismatchError,
    NonFiniteGradientError,
    PacelineError,
    format_ranks,
    warn,
)
from paceline.reducer.backward.backward_sync import BackwardSync
from paceline.reducer.backward.models_sharing_parameters import registry
from paceline.reducer.backward.uneven_inputs import take_over_model
from paceline.reducer.backward_errors import names_by_rank, shorten
from paceline.reducer.buffers import BufferSync
from paceline.reducer.communicator import Communicator, ReductionOptions
from paceline.reducer.local_sgd.options import LocalSGD, outer_step
from paceline.reducer.local_sgd.outer_tensors import OuterTensors
from paceline.reducer.plan import BucketCaps, CappedBuckets, plan_gradients
from paceline.reducer.reducer_interface import BackwardResult, BackwardStatus, Outcome
from paceline.reducer.replica_hashes import check_replicas

_Tensor = TypeVar("_Tensor", bound=Any)

# The flags that a rank reports in a sync, as its note; never 0, which means no note.
_SYNCS, _HAS_TRAINED, _IS_FINISHED, _HAS_STEPPED, _IN_FORWARD, _ON_DEMAND = 1, 2, 4, 8, 16, 32
_STATE = ("steps", "since_sync", "parameters", "momentum")


class ForwardModes:
    """Decides which forwards count as made by all ranks: some ranks may run others alone, in evaluation mode.

    So forwards in evaluation mode count only if all forwards of the last backward were in that mode.
    """

    def __init__(self) -> None:
        self._has_trained = self._trains_in_eval = False

    def is_of_all_ranks(self, *, is_training: bool) -> bool:
        self._has_trained = self._has_trained or is_training
        return is_training or self._trains_in_eval

    def end_backward(self) -> None:
        self._trains_in_eval, self._has_trained = not self._has_trained, False


class Warmup:
    """The backward passes over all ranks that come before replica groups train on their own."""

    def __init__(self, left: int, backward_sync: BackwardSync[Any]) -> None:
        self.left = left
        self._backward_sync, self._modes = backward_sync, ForwardModes()
        backward_sync.after_good = self._note_backward

    def is_over(self, *, is_training: bool) -> bool:
        is_of_all = self._modes.is_of_all_ranks(is_training=is_training)
        return is_of_all and self.left <= 0 and not self._backward_sync.autograd.is_in_backward()

    def _note_backward(self, weight: float) -> None:
        self.left -= 1
        self._modes.end_backward()


@final
class OuterSync(Generic[_Tensor]):
    """The syncs of one model's replica groups."""

    def __init__(
        self,
        options: LocalSGD,
        tensors: OuterTensors[_Tensor],
        communicator: Communicator[_Tensor],
        members: Sequence[Sequence[int]],
        backward_sync: BackwardSync[Any],
        buffers: BufferSync,
        caps: BucketCaps,
    ) -> None:
        self.communicator, self.buffers = communicator, buffers
        self.member = next(tuple(ranks) for ranks in members if communicator.rank in ranks)
        self.number = self.since = 0
        self._options, self._tensors, self._backward_sync, self._members = (
            options,
            tensors,
            backward_sync,
            members,
        )
        self._who = f"rank {communicator.rank} of {communicator.world_size}"
        self._weight = 0.0
        self._modes = ForwardModes()
        self._are_equal = False  # whether the groups were equal at the last sync; checked at the first one
        self._values: list[_Tensor] = []  # the parameters at the last sync
        self._momentum: list[_Tensor | None] = [None] * len(tensors.names)
        most = communicator.most_bucket_bytes
        plan = plan_gradients(
            tensors.specs(), caps if most is None else CappedBuckets(caps, most), None, whole=False
        )
        places = [tensors.copy(index) for index in range(len(tensors.names))]
        self._shapes = [tuple(place.shape) for place in places]
        finds_all = ReductionOptions(gradients_in_buffer=True, checks_finite=True, skip_unused=False)
        self._reduction = communicator.make_reduction(plan, places, finds_all)
        backward_sync.after_good = self._note_backward
        who = f"{format_ranks(self.member)} of {communicator.world_size}"
        number = members.index(self.member)
        backward_sync.among = f"host {number}, which has {who}" if options.between == "hosts" else who
        registry.begin_replica_group(backward_sync, backward_sync.among)

    @property
    def bits(self) -> str:
        """Which runs give the same bits; see `WrappedModel.bits`. The replica groups are the layout."""
        is_by_host = self._options.between == "hosts"
        return "layout" if is_by_host and self.communicator.bits == "world" else self.communicator.bits

    # --- when to sync ---

    def _note_backward(self, weight: float) -> None:
        self.since += 1
        self._weight += weight
        self._modes.end_backward()

    def begin_round(self) -> None:
        """Keep the parameters with which replica groups begin to train on their own."""
        if self.number == self.since == 0 and not self._are_equal:
            self._take_values()  # again, because weights may have been loaded after a first forward

    def begin_forward(self, *, is_training: bool) -> None:
        """Before a forward whose gradients will be needed, sync if it is time. Collective then."""
        if self._backward_sync.autograd.is_in_backward():
            return
        self.begin_round()
        if self._modes.is_of_all_ranks(is_training=is_training) and self.since >= self._options.every:
            self._sync(_IN_FORWARD)

    def sync_if_due(self) -> None:
        """Sync if it is time and no forward follows, because this rank has no data left. Collective then."""
        if self.since >= self._options.every:
            self._sync(0)

    def sync(self) -> None:
        """Sync now, at the request of this rank's program. Collective."""
        self._sync(_ON_DEMAND)

    def finish(self) -> None:
        """Sync until no rank has data left; then all have the same model. Collective."""
        while not self._sync(_IS_FINISHED):
            pass

    # --- a sync ---

    def _sync(self, why: int) -> bool:
        """Average the changes of the replica groups, and make a step of the outer optimizer. Collective.

        If it raises, no parameter has changed on this rank.

        Raises:
            NonFiniteGradientError: The change of a parameter is infinite or NaN somewhere; on all ranks.
            MismatchError: Ranks have made different numbers of syncs, or some sync in their next forward and
                some at the request of their program; on all ranks.
            ReplicasDifferError: At the first sync: the groups did not begin with the same parameters.
        """
        backward_sync = self._backward_sync
        backward_sync.state.check_process()
        if backward_sync.is_shared:
            raise ConfigError(
                "local_sgd: another wrapped model has some of the same parameters.",
                where=self._who,
                likely="two wrappers around models that share a layer, or around one model",
                hint="wrap one module that holds both; each parameter can be averaged in one way only",
            )
        try:
            return self._sync_all(why)
        except PacelineError:
            raise
        except BaseException as error:
            # For example of a signal handler. The others may have made the step, or wait, so all raise.
            backward_sync.give_up(error)
            self._reduction.reducer.give_up(error)
            raise

    def _sync_all(self, why: int) -> bool:
        backward_sync, tensors = self._backward_sync, self._tensors
        if (publish := self.communicator.publish) is not None:
            publish(f"in sync {self.number + 1} of local SGD")
        take_over_model(backward_sync, backward_sync.active)
        if not self._values:
            self._take_values()
        if not self._are_equal:
            self._check_values()
        # Including frozen ones that were trained since the last sync, because they differ between the groups.
        trained = [
            index
            for index, before in enumerate(self._values)
            if tensors.is_trained(index) or tensors.has_changed(index, before)
        ]
        result = self._average(trained, self._weight, why)
        notes = result.notes
        active = [rank for rank, note in enumerate(notes) if note & _HAS_TRAINED]
        if not active and any(note & _HAS_STEPPED for note in notes):
            # All backward passes had weight 0, but optimizers have stepped, by momentum or weight decay.
            result = self._average(trained, self.since, why)
            notes = result.notes
            active = [rank for rank, note in enumerate(notes) if note & _HAS_STEPPED]
        if active:
            if result.outcome & (Outcome.NONFINITE | Outcome.OVERFLOWED):
                raise self._nonfinite(result.nonfinite, result.overflowed)
            self._step(set(range(len(tensors.names))).difference(result.globally_unused))
            self.buffers.end_backward(active)
        self.number += 1
        self.since, self._weight = 0, 0.0
        if publish is not None:
            publish(f"after sync {self.number} of local SGD")
        return all(note & _IS_FINISHED for note in notes)

    def _average(self, trained: Sequence[int], weight: float, why: int) -> BackwardResult:
        reducer, places = self._reduction.reducer, self._reduction.places
        for index in trained:
            self._tensors.put_change(index, self._values[index], places[index])
        # This is 1 for the usual number of backward passes of weight 1, which needs no multiplication.
        reducer.set_weight(weight / self._options.every)
        flags = {_HAS_TRAINED: self._weight, _HAS_STEPPED: self.since}
        reducer.set_note(_SYNCS | why | sum(flag for flag, holds in flags.items() if holds))
        for index in trained:
            reducer.mark_ready(index, 0)
        result = reducer.finish(BackwardStatus(self.number + 1), True, True)
        outcome, notes = Outcome(result.outcome), result.notes
        is_uneven = all(any(note & flag for note in notes) for flag in (_IN_FORWARD, _ON_DEMAND))
        fails = is_uneven or outcome & (Outcome.SKIPPED | Outcome.NONFINITE | Outcome.OVERFLOWED)
        if (adopt_errors := self._reduction.adopt_errors) is not None:
            # After a failure the next sync sends the whole change again, so encoding errors are not kept.
            adopt_errors(None if fails else result.globally_unused)
        if Outcome.SKIPPED in outcome:
            raise self._mismatch([status.forwards for status in result.statuses])
        if is_uneven:
            raise self._uneven(notes)
        return result

    def _step(self, indices: set[int]) -> None:
        for index in sorted(indices):
            values, self._momentum[index] = outer_step(
                self._values[index], self._momentum[index], self._reduction.places[index], self._options
            )
            self._values[index] = values
            self._tensors.write(index, values)

    def _take_values(self) -> None:
        self._values = [self._tensors.copy(index) for index in range(len(self._tensors.names))]

    def _check_values(self) -> None:
        check_replicas(
            self._tensors.hashes(dict(zip(self._tensors.names, self._values, strict=True))),
            self.communicator.all_gather,
            where="the first sync of local SGD: the parameters with which the ranks began to train",
        )
        self._are_equal = True

    # --- the state ---

    def state(self, steps: int) -> dict[str, Any]:
        if self.since and self._weight != self.since:  # each group has its own weight, but all load one state
            warn(
                f"local_sgd_state_dict: in the middle of a round (since_sync={self.since}), without its "
                "weights. A rank that loads it continues as if all were 1. Call sync_parameters() first."
            )
        if not self._values:
            self._take_values()
        names = self._tensors.names
        momentum = {name: value * 1 for name, value in zip(names, self._momentum) if value is not None}
        values = {name: value * 1 for name, value in zip(names, self._values)}
        return dict(zip(_STATE, (steps, self.since, values, momentum), strict=True))

    def carried(self) -> dict[str, Any] | None:
        """The state from which a copy of the wrapper continues; see `go_on`. None: nothing is trained yet."""
        if not self._are_equal and self.since == 0:
            return None
        names = self._tensors.names
        momentum = {name: value for name, value in zip(names, self._momentum) if value is not None}
        values = dict(zip(names, self._values))
        return {**dict(zip(_STATE[1:], (self.since, values, momentum), strict=True)), "weight": self._weight}

    def go_on(self, carried: Mapping[str, Any]) -> None:
        """Continue as a copy, from what the copied wrapper's `carried` returned. Collective.

        Every rank keeps its own parameters, because groups have trained apart since the last sync.
        """
        names = self._tensors.names
        values = self._loaded(carried["parameters"], "parameters")
        momentum = self._loaded(carried["momentum"], "momentum")
        own = {name: self._tensors.copy(index) for index, name in enumerate(names)}
        outer = [*self._tensors.hashes(values), *self._tensors.hashes(momentum)]
        digests = [
            hashlib.sha256(repr(each).encode()).digest() for each in (outer, self._tensors.hashes(own))
        ]
        reported = self.communicator.all_gather(b"".join(digests))
        size = len(digests[0])
        odd = [rank for rank, each in enumerate(reported) if each[:size] != reported[0][:size]]
        if odd:
            raise _other_copies(odd, len(reported), "parameters or the momentum of the last sync", "rank 0")
        for member in self._members:
            odd = [rank for rank in member if reported[rank] != reported[member[0]]]
            if odd:
                first = f"rank {member[0]}, with which they train as one"
                raise _other_copies(odd, len(reported), "parameters", first)
        self._values, self._momentum = list(values.values()), [momentum.get(name) for name in names]
        self.since, self._weight, self._are_equal = carried["since_sync"], carried["weight"], True

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `check_state` has accepted. Collective."""
        names = self._tensors.names
        values = self._loaded(state["parameters"], "parameters")
        momentum = self._loaded(state["momentum"], "momentum")
        entries = [*self._tensors.hashes(values), *self._tensors.hashes(momentum)]
        check_same_state(self.communicator, state["since_sync"], *entries)
        self._values = [values[name] for name in names] if values else []
        self._momentum = [momentum.get(name) for name in names]
        self._are_equal = bool(values)
        self.since = state["since_sync"]
        self._weight = float(self.since)

    def _loaded(self, given: Mapping[str, Any], what: str) -> dict[str, _Tensor]:
        names = self._tensors.names
        unknown_peers = sorted(set(given) - set(names))
        missing = [name for name in names if name not in given] if what == "parameters" and given else []
        if unknown_peers or missing:
            raise ConfigError(
                "load_local_sgd_state_dict: this is the state of another model.",
                where=f"its {what!r}",
                seen="\n".join(
                    f"{word}: {shorten(found)}"
                    for word, found in (("not in the model", unknown_peers), ("missing", missing))
                    if found
                ),
                hint="load it into the model whose local_sgd_state_dict() it is",
            )
        loaded = {}
        for index, name in enumerate(names):
            if name not in given:
                continue
            values, shape = self._tensors.like(index, given[name]), self._shapes[index]
            if values is None or tuple(values.shape) != shape:
                raise ConfigError(
                    f"load_local_sgd_state_dict: the {what} of '{name}' do not fit.",
                    expected=f"a tensor of the shape {shape}",
                    got=type(given[name]).__name__ if values is None else f"shape {tuple(values.shape)}",
                    hint="load it into the model whose local_sgd_state_dict() it is",
                )
            loaded[name] = values
        return loaded

    # --- errors ---

    def _replica_group_of(self, rank: int) -> str:
        if self._options.between == "ranks":
            return f"rank {rank}"
        return next(f"rank {rank} (host {host})" for host, ranks in enumerate(self._members) if rank in ranks)

    def _mismatch(self, numbers: Sequence[int]) -> MismatchError:
        rows = [f"{self._replica_group_of(rank)}: sync {number}" for rank, number in enumerate(numbers)]
        return MismatchError(
            "Ranks are in different syncs of local SGD; no parameter has changed.",
            where=self._who,
            seen="\n".join(rows),
            likely="sync_parameters() was called on some ranks only, or a checkpoint was loaded on some only",
            hint="make the same calls on all ranks",
        )

    def _uneven(self, notes: Sequence[int]) -> MismatchError:
        words = {
            _IN_FORWARD: f"in a forward, after {self._options.every} steps",
            _ON_DEMAND: "in sync_parameters()",
        }
        rows = [
            f"{self._replica_group_of(rank)}: {word}"
            for rank, note in enumerate(notes)
            for flag, word in words.items()
            if note & flag
        ]
        return MismatchError(
            "Ranks sync in local SGD at different places of their programs; no parameter has changed.",
            where=f"{self._who}, sync {self.number + 1}",
            seen="\n".join(rows),
            likely="some ranks have made fewer steps: one has caught an error and left out a step, or has "
            "fewer batches; or sync_parameters() was called on some ranks only",
            hint="call sync_parameters() after the same number of steps on all ranks; for uneven data use "
            "finish() or iterate()",
        )

    def _nonfinite(
        self, pairs: Sequence[tuple[int, int]], overflowed: Sequence[int]
    ) -> NonFiniteGradientError:
        names = self._tensors.names
        found = names_by_rank(pairs, names)
        sums = tuple(names[index] for index in overflowed)
        rows = [f"{self._replica_group_of(rank)}: {shorten(held)}" for rank, held in found.items()]
        if sums:
            rows.append(f"finite on every rank, but not their sum: {shorten(sums)}")
        return NonFiniteGradientError(
            f"After {self.since} steps of local SGD parameters hold an infinity or a NaN on "
            f"{format_ranks(found)} of {self.communicator.world_size}."
            if found
            else "The mean of what the replicas have changed in local SGD overflowed.",
            where=f"sync {self.number + 1}; no parameter has changed, on any rank",
            seen="\n".join(rows),
            likely="training has diverged there since the last sync: its learning rate is too large, or a "
            "batch gave a NaN that the optimizer stepped with",
            hint='nonfinite="raise" stops in the step that does it; local_sgd_state_dict() has what the '
            "parameters were at the last sync",
            nonfinite=found,
            overflowed=sums,
        )


def _other_copies(odd: Sequence[int], world_size: int, what: str, whose: str) -> ModelMismatchError:
    return ModelMismatchError(
        f"{format_ranks(odd).capitalize()} of {world_size} cannot go on as a copy in local SGD.",
        where="the first training forward of a copy of a wrapped model, which connects it",
        seen=f"other {what} than on {whose}",
        likely="a copy that was made in another step, or a file of another rank",
        hint="copy, or load, on all ranks what all ranks have made in the same step",
    )


def check_same_state(communicator: Communicator[Any], *what: Any) -> None:
    """Raise unless all ranks load the same state. Collective."""
    reported = communicator.all_gather(hashlib.sha256(repr(what).encode()).digest())
    if len(set(reported)) > 1:
        odd = [rank for rank, each in enumerate(reported) if each != reported[0]]
        raise ModelMismatchError(
            f"load_local_sgd_state_dict: {format_ranks(odd)} of {len(reported)} "
            f"{'loads' if len(odd) == 1 else 'load'} another state than rank 0.",
            expected="the same state on all ranks",
            likely="checkpoints of different steps, or a file that not every host has",
            hint="load the checkpoint of one rank on all ranks",
        )


def state_before(steps: int) -> dict[str, Any]:
    return dict(zip(_STATE, (steps, 0, {}, {}), strict=True))


def carried_by(state: Mapping[str, Any]) -> dict[str, Any] | None:
    rest = {name: state[name] for name in _STATE[1:]}
    return {**rest, "weight": float(state["since_sync"])} if state["parameters"] else None


def state_of_copy(steps: int, carried: Mapping[str, Any]) -> dict[str, Any]:
    copied = {what: {name: value * 1 for name, value in carried[what].items()} for what in _STATE[2:]}
    return {"steps": steps, "since_sync": carried["since_sync"], **copied}


def check_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The argument of load_local_sgd_state_dict, after a check that it has the form of a state."""
    is_state = (
        isinstance(state, Mapping)
        and set(state) == set(_STATE)
        and all(type(state[name]) is int and state[name] >= 0 for name in _STATE[:2])
        and all(isinstance(state[name], Mapping) for name in _STATE[2:])
    )
    if not is_state:
        got = f"keys {sorted(map(str, state))}" if isinstance(state, Mapping) else type(state).__name__
        raise ConfigError(
            "load_local_sgd_state_dict: this is no state of local SGD.",
            expected=f"what local_sgd_state_dict() returned: a dictionary of {', '.join(_STATE)}",
            got=got,
            hint="the model's own weights are loaded into the model",
        )
    return state
