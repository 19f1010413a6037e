"""The errors that a backward pass can end in, with names for indices. Pure.

Imports only the standard library, `errors` and `protocol`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.errors import (
    ConfigError,
    GraphChangedError,
    NonFiniteGradientError,
    SkippedPassError,
    UnusedParameterError,
    format_ranks,
)
from paceline.reducer.protocol import PassStatus

_SHOWN_NAMES = 6
_SHOWN_GROUPS = 8


def unused_error(unused_by_rank: Sequence[Iterable[int]], names: Sequence[str]) -> UnusedParameterError:
    """Some rank left parameters without a gradient, and that was not allowed.

    Args:
        unused_by_rank: Parameter indices, one collection per rank.
        names: Of the parameters.

    Example:
        Rank 1 of 2 left `head.bias` out: "1 of 4 parameters got no gradient on rank 1 of 2."
    """
    ranks_of = _invert(enumerate(unused_by_rank))
    world_size = len(unused_by_rank)
    who = sorted({rank for ranks in ranks_of.values() for rank in ranks})
    everywhere = len(who) == world_size and all(len(ranks) == world_size for ranks in ranks_of.values())
    return UnusedParameterError(
        f"{len(ranks_of)} of {_counted(len(names), 'parameter')} got no gradient on "
        f"{_of_world(who, world_size)}.",
        where="the end of backward; the gradients of this pass are of no use, on any rank",
        seen=_rows(ranks_of, names),
        likely="the loss does not depend on these parameters"
        + ("" if everywhere else ", or these ranks took another branch in forward, or froze them"),
        hint="use every output of forward in the loss; if some parameters are meant to be idle in some "
        "steps, pass find_unused_parameters=True, or freeze them on every rank",
        unused={names[index]: tuple(ranks) for index, ranks in sorted(ranks_of.items())},
    )


def nobodys_warning(indices: Sequence[int], names: Sequence[str], world_size: int) -> str:
    """No rank gave these parameters a gradient, and that is allowed.

    Example:
        "1 of 4 parameters got no gradient on all 2 ranks: head.bias."
    """
    return (
        f"{len(indices)} of {_counted(len(names), 'parameter')} got no gradient on "
        f"{_of_world(range(world_size), world_size)}: {shorten([names[index] for index in indices])}.\n"
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
    """The mean holds an infinity or a NaN: some rank's gradient did, or the sum over the ranks overflowed.

    Args:
        pairs: (rank, parameter index) of each such gradient.
        names: Of the parameters.
        world_size: Number of ranks.
        overflowed: Parameters whose gradients are finite on every rank, and whose sum is not.
    """
    found = sorted(set(pairs))
    ranks_of = _invert((rank, [index]) for rank, index in found)
    who = sorted({rank for rank, _ in found})
    sums = tuple(names[index] for index in sorted(set(overflowed)))
    seen = [_rows(ranks_of, names)] if found else []
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
        hint='nonfinite="raise" stops at the first such pass, "ignore" is silent; skip the step, or '
        + ("clip" if found else "scale the loss down"),
        nonfinite={rank: tuple(names[index] for r, index in found if r == rank) for rank in who},
        overflowed=sums,
    )


def check_twice(statuses: Sequence[PassStatus], names: Sequence[str]) -> None:
    """Raise if on some rank a gradient came again after it was handed over.

    Raises:
        GraphChangedError: Names the parameters, by rank.
    """
    ranks_of, who = _told([status.twice for status in statuses])
    if not ranks_of:
        return
    twice = tuple(names[index] for index in sorted(ranks_of))
    raise GraphChangedError(
        f"The gradient of '{shorten(twice)}' came twice in one backward, on {who}.",
        where="the end of backward; the gradients of this pass are of no use, on any rank",
        seen=_rows(ranks_of, names),
        likely="a parameter that several segments of reentrant activation checkpointing use",
        hint="checkpoint with use_reentrant=False; or promise static_graph=True, which learns it from the "
        "first pass",
        changed=twice,
    )


def check_refused(statuses: Sequence[PassStatus], names: Sequence[str]) -> None:
    """Raise if on another rank a gradient cannot be averaged.

    Raises:
        ConfigError: Names the parameters, by rank.

    Example:
        On rank 0, if rank 1 of 2 got a gradient of another dtype: "The gradient of 'fc.weight' cannot be
        averaged on rank 1 of 2."
    """
    ranks_of, who = _told([status.refused for status in statuses])
    if not ranks_of:
        return
    refused = tuple(names[index] for index in sorted(ranks_of))
    raise ConfigError(
        f"The gradient of '{shorten(refused)}' cannot be averaged on {who}.",
        where="the end of backward; the gradients of this pass are of no use, on any rank",
        seen=_rows(ranks_of, names),
        likely="a hook, or a conversion of the model, that is on these ranks only",
        hint="the error on these ranks says what is wrong with it",
    )


def graph_changed_error(
    lost_by_rank: Mapping[int, Sequence[int]],
    gained_by_rank: Mapping[int, Sequence[int]],
    names: Sequence[str],
) -> GraphChangedError:
    """Other parameters are used than in the first pass, although static_graph promised the same.

    Args:
        lost_by_rank: Indices of parameters that were used in the first pass and are not in this one.
        gained_by_rank: Of those that are used in this one only.
        names: Of the parameters.
    """
    lost, gained = _invert(lost_by_rank.items()), _invert(gained_by_rank.items())
    rows = [("no gradient any more", lost), ("no gradient in the first pass", gained)]
    return GraphChangedError(
        "The graph changed, although static_graph=True promised that it would not.",
        where="the end of backward; the gradients of this pass are of no use, on any rank",
        seen="\n".join(f"{what}, {_rows(ranks_of, names)}" for what, ranks_of in rows if ranks_of),
        likely="a branch in forward that some steps take and others don't",
        hint="pass find_unused_parameters=True instead of static_graph=True",
        changed=tuple(names[index] for index in sorted({*lost, *gained})),
    )


def skipped_error(statuses: Sequence[PassStatus]) -> SkippedPassError:
    """Ranks did not make the same number of forwards before this backward.

    Args:
        statuses: Of the ranks, with their forwards since the previous synchronised backward.
    """
    world_size = len(statuses)
    interrupted = [rank for rank, status in enumerate(statuses) if status.interrupted]
    if interrupted:
        return _interrupted_error(interrupted, world_size)
    active = [(rank, status.forwards) for rank, status in enumerate(statuses) if not status.finished]
    counts = _invert((rank, [count]) for rank, count in active)
    usual = max(counts, key=lambda count: (len(counts[count]), -count))
    ahead = [rank for rank, count in active if count > usual]
    odd = [rank for rank, count in active if count != usual]
    return SkippedPassError(
        f"{_of_world(odd, world_size).capitalize()} skipped a forward or a backward that others made.",
        where="the end of backward; the gradients of this pass are of no use, on any rank",
        seen="\n".join(
            f"{format_ranks(ranks)}: {_counted(count, 'forward')} since the last backward"
            for count, ranks in sorted(counts.items())
        ),
        likely="a `continue` between forward and backward, on some ranks only"
        if ahead
        else "a forward in a branch that only some ranks took",
        hint="make the decision to skip the same on every rank, or run backward on a loss times 0",
        ranks=tuple(odd),
    )


def uneven_error(statuses: Sequence[PassStatus]) -> SkippedPassError:
    """Some ranks have no more data, and join(throw_on_early_termination=True) was asked for.

    Args:
        statuses: Of the ranks.
    """
    without = [rank for rank, status in enumerate(statuses) if status.finished]
    return SkippedPassError(
        f"{_of_world(without, len(statuses)).capitalize()} exhausted the inputs before the others.",
        where="the end of backward; the gradients of this pass are of no use, on any rank",
        expected="as many batches on every rank, because of throw_on_early_termination=True",
        hint="leave it out: then join() lets the others go on",
        ranks=tuple(without),
    )


def _interrupted_error(ranks: Sequence[int], world_size: int) -> SkippedPassError:
    return SkippedPassError(
        f"The backward of {_of_world(ranks, world_size)} ended in an exception.",
        where="this pass; its gradients are of no use, on any rank",
        seen=f"{format_ranks(ranks)} began another forward or backward after that",
        likely="an error raised inside backward (out of memory, a failing hook) that the script caught",
        hint="look at the output there for the exception; after one, make every rank repeat the step",
        ranks=tuple(ranks),
    )


def _told(index_by_rank: Sequence[int | None]) -> tuple[dict[int, list[int]], str]:
    """Ranks of each parameter that some rank tells; and all these ranks in words."""
    pairs = [(rank, [index]) for rank, index in enumerate(index_by_rank) if index is not None]
    return _invert(pairs), _of_world([rank for rank, _ in pairs], len(index_by_rank))


def _of_world(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return f"all {world_size} ranks"
    return f"{format_ranks(ranks)} of {world_size}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _invert(indices_by_rank: Iterable[tuple[int, Iterable[int]]]) -> dict[int, list[int]]:
    """Ranks of each index, in rank order."""
    ranks_of: dict[int, list[int]] = {}
    for rank, indices in indices_by_rank:
        for index in indices:
            ranks_of.setdefault(index, []).append(rank)
    return ranks_of


def _rows(ranks_of: Mapping[int, Sequence[int]], names: Sequence[str]) -> str:
    """One line per group of ranks: its parameters, the first few by name."""
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
    """Names of parameters for each rank that (rank, parameter index) pairs name.

    Example:
        >>> names_by_rank([(1, 0), (1, 0), (0, 1)], ["weight", "bias"])
        {0: ('bias',), 1: ('weight',)}
    """
    indices: dict[int, list[int]] = {}
    for rank, index in sorted(set(pairs)):
        indices.setdefault(rank, []).append(index)
    return {rank: tuple(names[index] for index in found) for rank, found in indices.items()}


def shorten(names: Sequence[str]) -> str:
    """The first few names and how many more there are.

    Example:
        >>> shorten(["a", "b"])
        'a, b'
    """
    if len(names) <= _SHOWN_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _SHOWN_NAMES - 1])} and {len(names) - _SHOWN_NAMES + 1} more"
