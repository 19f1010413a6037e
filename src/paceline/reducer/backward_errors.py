"""The errors and warnings for the outcome of a backward, the same for every framework and on every rank.

`Judge` decides which to raise. After it come the errors, with names in place of indices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.errors import (
    ConfigError,
    GraphChangedError,
    ModelMismatchError,
    NonFiniteGradientError,
    SkippedPassError,
    UnusedParameterError,
    format_ranks,
    warn,
)
from paceline.reducer.backward_reports import differ_in_frozen_only, is_all_unused_frozen
from paceline.reducer.reducer_interface import BackwardResult, BackwardStatus, Outcome

_SHOWN_NAMES = 6
_SHOWN_GROUPS = 8


class Unweighed(NamedTuple):
    """The reason why a rank's gradients are not those of the weighted mean.

    Attributes:
        error: The reason.
        exchanges: The micro-batches, by number and weight, in whose backward gradients crossed ranks without
            weights. If every rank has the same list, the gradients are right nevertheless, because the weight
            is a factor of the whole sum. Empty: the gradients are wrong.
    """

    error: ConfigError
    exchanges: list[tuple[int, float]]


class Judge:
    """Decides whether an outcome raises, warns, or is accepted."""

    def __init__(
        self,
        names: Sequence[str],
        world_size: int,
        *,
        allow_unused: bool,
        nonfinite: str,
        all_gather: Callable[[bytes], list[bytes]],
        check_graph: Callable[[Sequence[BackwardStatus]], None] | None = None,
    ) -> None:
        self._all_gather = all_gather
        self._names = names
        self._world_size = world_size
        self._allow_unused = allow_unused
        self._nonfinite = nonfinite
        self._check_graph = check_graph
        self._has_warned = False
        self._has_warned_of_globally_unused = False

    def judge(
        self,
        result: BackwardResult,
        refusal: ConfigError | None = None,
        unweighed: Unweighed | None = None,
    ) -> None:
        """Raise or warn according to the result of `reducer.finish`; the same on every rank."""
        outcome, statuses = Outcome(result.outcome), result.statuses
        if not any(status.interrupted for status in statuses):
            check_weighed(statuses, len(self._names), unweighed, self._all_gather)
            if refusal is not None:
                raise refusal
            check_refused(statuses, self._names)
            check_twice(statuses, self._names)
            if self._check_graph is not None:
                self._check_graph(statuses)
        if Outcome.SKIPPED in outcome and not differ_in_frozen_only(statuses):
            check_promises(statuses)
            raise skipped_error(statuses)
        if Outcome.SKIPPED in outcome or (
            Outcome.UNUSED in outcome and not self._allow_unused and not is_all_unused_frozen(result)
        ):
            raise unused_error(result.unused, self._names)
        if Outcome.GLOBALLY_UNUSED in outcome and not self._has_warned_of_globally_unused:
            self._has_warned_of_globally_unused = True
            text = globally_unused_warning(result.globally_unused, self._names, self._world_size)
            warn(text)
        if outcome & (Outcome.NONFINITE | Outcome.OVERFLOWED):
            self.judge_nonfinite(result.nonfinite, result.overflowed)

    def judge_nonfinite(self, pairs: Sequence[tuple[int, int]], overflowed: Sequence[int] = ()) -> None:
        if (pairs or overflowed) and self._nonfinite != "ignore":
            error = nonfinite_error(pairs, self._names, self._world_size, overflowed)
            if self._nonfinite == "raise":
                raise error
            if not self._has_warned:
                self._has_warned = True
                warn(f"{error}\n  (reported once)")


def unused_error(unused_by_rank: Sequence[Iterable[int]], names: Sequence[str]) -> UnusedParameterError:
    """For parameters that some rank left without a gradient, when that was not allowed."""
    ranks_of = ranks_by_index(enumerate(unused_by_rank))
    world_size = len(unused_by_rank)
    who = sorted({rank for ranks in ranks_of.values() for rank in ranks})
    everywhere = len(who) == world_size and all(len(ranks) == world_size for ranks in ranks_of.values())
    where = f"any of the {world_size} ranks" if everywhere and world_size > 1 else _of_world(who, world_size)
    return UnusedParameterError(
        f"{len(ranks_of)} of {_counted(len(names), 'parameter')} got no gradient on "
        f"{where if everywhere or len(who) < world_size else f'some of the {world_size} ranks'}.",
        where="the end of backward; the gradients of this backward are not to be used, on any rank",
        seen=name_rows(ranks_of, names),
        likely="the loss does not depend on these parameters"
        + ("" if everywhere else ", or these ranks took another branch in forward, or froze them"),
        hint="use every output of forward in the loss; if some parameters are meant to be idle in some "
        "steps, pass find_unused_parameters=True, or freeze them on every rank",
        unused={names[index]: tuple(ranks) for index, ranks in sorted(ranks_of.items())},
    )


def globally_unused_warning(indices: Sequence[int], names: Sequence[str], world_size: int) -> str:
    """For parameters that no rank gave a gradient, when that is allowed."""
    where = f"any of the {world_size} ranks" if world_size > 1 else "rank 0 of 1"
    return (
        f"{len(indices)} of {_counted(len(names), 'parameter')} got no gradient on {where}: "
        f"{shorten([names[index] for index in indices])}.\n"
        "  seen: nothing differs between the ranks; `.grad` of these parameters stays as it was\n"
        "  likely: the loss does not depend on these parameters\n"
        "  hint: if that is meant, find_unused_parameters=True is silent; if some ranks use them later and "
        "others do not, that raises without it\n"
        "  (reported once)"
    )


def nonfinite_error(
    pairs: Iterable[tuple[int, int]],
    names: Sequence[str],
    world_size: int,
    overflowed: Iterable[int] = (),
) -> NonFiniteGradientError:
    """For a mean with an infinity or a NaN: some rank's gradient has one, or the sum overflowed."""
    found = sorted(set(pairs))
    ranks_of = ranks_by_index((rank, [index]) for rank, index in found)
    who = sorted({rank for rank, _ in found})
    sums = tuple(names[index] for index in sorted(set(overflowed)))
    seen = [name_rows(ranks_of, names)] if found else []
    likely = [
        "the loss overflowed or divided by zero there: look at its batch, and at the learning rate"
    ] * bool(found)
    if sums:
        seen.append(f"finite on every rank, but not their sum: {shorten(sums)}")
        likely.append("gradients near the largest number of their type, or weights of ranks that are large")
    return NonFiniteGradientError(
        f"The gradient holds an infinity or a NaN on {_of_world(who, world_size)}."
        if found
        else f"The sum of the gradients over {world_size} ranks overflowed, though each is finite.",
        where="the end of backward; the average has it on every rank now",
        seen="\n".join(seen),
        likely="\n".join(likely),
        hint='nonfinite="raise" stops at the first such backward, "ignore" is silent; skip the step, or '
        + ("clip" if found else "scale the loss down"),
        nonfinite={rank: tuple(names[index] for r, index in found if r == rank) for rank in who},
        overflowed=sums,
    )


def check_twice(statuses: Sequence[BackwardStatus], names: Sequence[str]) -> None:
    """Raise if some rank got a second gradient of a parameter after the first was handed over."""
    ranks_of, who = _reported([status.twice for status in statuses])
    if not ranks_of:
        return
    twice = tuple(names[index] for index in sorted(ranks_of))
    raise GraphChangedError(
        f"The gradient of '{shorten(twice)}' came twice in one backward, on {who}.",
        where="the end of backward; the gradients of this backward are not to be used, on any rank",
        seen=name_rows(ranks_of, names),
        likely="a parameter that several segments of reentrant activation checkpointing use",
        hint="checkpoint with use_reentrant=False; or promise static_graph=True, which learns it from the "
        "first backward",
        changed=twice,
    )


def check_refused(statuses: Sequence[BackwardStatus], names: Sequence[str]) -> None:
    """Raise if a gradient cannot be averaged on some rank."""
    refused_by_rank = [status.refused for status in statuses]
    ranks_of, who = _reported([None if index == len(names) else index for index in refused_by_rank])
    if not ranks_of:
        return
    refused = tuple(names[index] for index in sorted(ranks_of))
    raise ConfigError(
        f"The gradient of '{shorten(refused)}' cannot be averaged on {who}.",
        where="the end of backward; the gradients of this backward are not to be used, on any rank",
        seen=name_rows(ranks_of, names),
        likely="a hook, or a conversion of the model, that is on these ranks only",
        hint="the error on these ranks says what is wrong with it",
    )


def check_weighed(
    statuses: Sequence[BackwardStatus],
    num_parameters: int,
    unweighed: Unweighed | None,
    all_gather: Callable[[bytes], list[bytes]],
) -> None:
    """Raise if gradients are not weighed on some rank.

    That rank reports it as a `refused` index past the last parameter. This raises on all ranks alike, and is
    collective if a rank reported it, because only that rank knows the reason.
    """
    ranks = [rank for rank, status in enumerate(statuses) if status.refused == num_parameters]
    if not ranks:
        return
    rows = ("summary", "seen", "expected", "likely", "hint")
    own = {} if unweighed is None else {row: getattr(unweighed.error, row) for row in rows}
    exchanges = [] if unweighed is None else unweighed.exchanges
    reported = [json.loads(each) for each in all_gather(json.dumps([exchanges, own]).encode())]
    if exchanges and all(each == reported[0][0] for each, _ in reported):
        return
    ranks = [rank for rank in ranks if not reported[rank][0]] or ranks
    found = reported[ranks[0]][1]
    raise ConfigError(
        found.pop("summary"),
        where=f"{_of_world(ranks, len(statuses))}, at the end of backward; "
        "the gradients of this backward are not to be used, on any rank",
        **found,
    )


def swapped_error(name: str, where: str) -> ConfigError:
    return ConfigError(
        f"The gradient of '{name}' came unweighted: it is another tensor than when it was wrapped.",
        where=f"{where}, the end of backward; the gradients of this backward are not to be used, on any rank",
        likely="torch.utils.swap_tensors(); or .to() or load_state_dict() with "
        "torch.__future__.set_swap_module_params_on_conversion(True)",
        hint="convert and load before wrapping; or wrap `ddp.module` again, on every rank",
        parameter=name,
    )


def skipped_error(statuses: Sequence[BackwardStatus]) -> SkippedPassError:
    """For ranks that differ in their forwards since the last synchronised backward, or in how many of these
    the backward has not reached.
    """
    world_size = len(statuses)
    interrupted = [rank for rank, status in enumerate(statuses) if status.interrupted]
    if interrupted:
        return _interrupted_error(interrupted, world_size)
    active = [(rank, status) for rank, status in enumerate(statuses) if not status.finished]
    # A rank that differs from most ranks in the number of unreached forwards skipped a backward: other ranks
    # may have run more forwards per backward. But if some ranks ran no forward, only some ranks made this
    # backward.
    has_extra = len({status.forwards > 0 for _, status in active}) > 1
    said = {
        rank: min(status.forwards, 1) if has_extra else status.forwards - status.reached
        for rank, status in active
    }
    ranks_of = ranks_by_index((rank, [number]) for rank, number in said.items())
    usual = max(ranks_of, key=lambda number: (len(ranks_of[number]), number if has_extra else -number))
    odd = [rank for rank, number in said.items() if number != usual]
    hint = "make the decision to skip the same on every rank, or run backward on a loss times 0"
    if has_extra:
        hint = "run a backward of one rank alone in no_sync(); call train() and eval() on every rank alike"
        likely = "a backward that some ranks alone make, or a model in evaluation mode on some ranks only"
    elif not any(status.reached for _, status in active):
        hint = "return tensors, tuples, lists or dicts of them, or make as many forwards on every rank"
        likely = "other numbers of forwards, whose outputs are in objects in which no tensor is found"
    elif usual < max(ranks_of):
        likely = "a `continue` between forward and backward, or a forward just to look, on some ranks only"
        hint += "; a forward that does not train belongs under no_grad()"
    else:
        likely = "a forward in a branch that only some ranks took"
    counts: dict[tuple[int, int], list[int]] = {}
    for rank, status in active:
        counts.setdefault((status.forwards, status.reached), []).append(rank)
    return SkippedPassError(
        f"{_of_world(odd, world_size).capitalize()} skipped a forward or a backward that others made.",
        where="the end of backward; the gradients of this backward are not to be used, on any rank",
        seen="\n".join(
            f"{format_ranks(ranks)}: {_counted(forwards, 'forward')} since the last backward"
            + (f", {forwards - reached} of which this backward has not reached" if reached < forwards else "")
            for (forwards, reached), ranks in sorted(counts.items())
        ),
        likely=likely,
        hint=hint,
        ranks=tuple(odd),
    )


def uneven_error(statuses: Sequence[BackwardStatus]) -> SkippedPassError:
    """For ranks that have no more data, with join(throw_on_early_termination=True)."""
    without = [rank for rank, status in enumerate(statuses) if status.finished]
    return SkippedPassError(
        f"{_of_world(without, len(statuses)).capitalize()} exhausted the inputs before the others.",
        where="the end of backward; the gradients of this backward are not to be used, on any rank",
        expected="as many batches on every rank, because of throw_on_early_termination=True",
        hint="leave it out: then join() lets the others go on",
        ranks=tuple(without),
    )


def _interrupted_error(ranks: Sequence[int], world_size: int) -> SkippedPassError:
    return SkippedPassError(
        f"The backward of {_of_world(ranks, world_size)} ended in an exception.",
        where="this backward; its gradients are not to be used, on any rank",
        seen=f"{format_ranks(ranks)} began another forward or backward after that",
        likely="an error raised inside backward (out of memory, a failing hook) that the script caught",
        hint="look at the output there for the exception; catch this error where that one is caught, and "
        "all ranks go on with the same step",
        ranks=tuple(ranks),
    )


def _reported(index_by_rank: Sequence[int | None]) -> tuple[dict[int, list[int]], str]:
    pairs = [(rank, [index]) for rank, index in enumerate(index_by_rank) if index is not None]
    return ranks_by_index(pairs), _of_world([rank for rank, _ in pairs], len(index_by_rank))


def _of_world(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return f"all {world_size} ranks"
    return f"{format_ranks(ranks)} of {world_size}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def ranks_by_index(indices_by_rank: Iterable[tuple[int, Iterable[int]]]) -> dict[int, list[int]]:
    """The ranks of each parameter index, from each rank's indices."""
    ranks_of: dict[int, list[int]] = {}
    for rank, indices in indices_by_rank:
        for index in indices:
            ranks_of.setdefault(index, []).append(rank)
    return ranks_of


def name_rows(ranks_of: Mapping[int, Sequence[int]], names: Sequence[str]) -> str:
    """Parameter names, one line for each set of ranks."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for index, ranks in sorted(ranks_of.items()):
        groups.setdefault(tuple(ranks), []).append(names[index])
    lines = [
        f"{format_ranks(ranks)}: {shorten(group)}" for ranks, group in list(groups.items())[:_SHOWN_GROUPS]
    ]
    if len(groups) > _SHOWN_GROUPS:
        lines.append(f"... and {len(groups) - _SHOWN_GROUPS} more combinations of ranks")
    return "\n".join(lines)


def names_by_rank(pairs: Iterable[tuple[int, int]], names: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Parameter names by rank, from (rank, parameter index) pairs."""
    indices: dict[int, list[int]] = {}
    for rank, index in sorted(set(pairs)):
        indices.setdefault(rank, []).append(index)
    return {rank: tuple(names[index] for index in found) for rank, found in indices.items()}


def shorten(names: Sequence[str]) -> str:
    """The first few names and the number of the others."""
    if len(names) <= _SHOWN_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _SHOWN_NAMES - 1])} and {len(names) - _SHOWN_NAMES + 1} more"


def check_promises(statuses: Sequence[BackwardStatus]) -> None:
    counting = [rank for rank, status in enumerate(statuses) if status.is_count]
    promised = [rank for rank in counting if statuses[rank].static_graph]
    others = [rank for rank in counting if rank not in promised]
    if promised and others:
        raise ModelMismatchError(
            "The ranks train with different arguments: static_graph differs.",
            where="the end of backward; the gradients of this backward are not to be used, on any rank",
            seen=f"{format_ranks(promised)}: static_graph=True\n{format_ranks(others)}: static_graph=False",
            likely="_set_static_graph() was called on some ranks only",
            hint="call it on every rank, before the first backward; or pass static_graph=True when wrapping",
            parameter="static_graph",
        )


def exit_warning(who: str, waiting: list[int], among: str = "") -> str:
    among = f" (counted from 0 on {among})" if among else ""
    return (
        f"{who.capitalize()} leaves while {format_ranks(waiting)}{among} "
        f"{'waits' if len(waiting) == 1 else 'wait'} for it at the end of another backward.\n"
        "  likely   this rank had fewer batches, skipped an iteration, or leaves too early\n"
        "  hint     for other numbers of batches, use ddp.iterate(loader) or ddp.finish(); if it skipped an "
        "iteration, the steps of the ranks belong to different iterations since then: make every decision to "
        "skip on all ranks alike"
    )
