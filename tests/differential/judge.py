"""Decides whether the ranks' records agree with each other and the reference, in any framework.

equal      every rank reached the end with the reference's values, and the same bits
refused    every rank raised; no rank went on alone, and all values until then were right
engine     the process group's library has ended a process, in a known way; all others raised
known      of the framework's own wrapper only: it differs from the reference in a way that is listed
anything else is a finding: a silent difference, a rank that raised or went on alone, a hang, a crash
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from tests.differential.records import Event, Lost, Record, Value

R = TypeVar("R", Record, Record | Lost)

EQUAL = "equal"
REFUSED = "refused"
USER_ERROR = "ended by the program's own error"
INVALID = "an error in the reference, too"
ENGINE_CRASH = "a crash of the engine below"
KNOWN = "a known difference of the framework's own wrapper"
FINE = (EQUAL, REFUSED, USER_ERROR, INVALID, ENGINE_CRASH, KNOWN)
# The limit for sums of some ranks' gradients in float32.
_TOO_LARGE = float(np.finfo(np.float32).max) / 64


@dataclass(frozen=True)
class Verdict:
    """The result of one program in one mode.

    Attributes:
        kind: One of `FINE`, or the finding.
        at: Label of the op.
        text: Expected and got, by rank.
        error: Type of the error with which the program was refused; for a known difference: its name.
    """

    kind: str
    at: str = ""
    text: str = ""
    error: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind not in FINE


def judge(
    records: Sequence[Record | Lost],
    expected: Sequence[Record] | None,
    *,
    tolerance: float,
    same_parameters: bool = True,
    is_engine_crash: Callable[[Lost], bool] = lambda lost: False,
) -> Verdict:
    """Judge one run.

    Args:
        records: By rank.
        expected: The reference's, by rank; None: ranks are compared with each other only.
        tolerance: Relative to the largest value of an array.
        same_parameters: False: steps after backward may differ in bits between ranks (flushing denormals).
        is_engine_crash: Whether the process group's library ended a process in a known way.
    """
    whole = _whole(records)
    lost = [(rank, record) for rank, record in enumerate(records) if isinstance(record, Lost)]
    if lost:
        kind = "hang" if all(record.how == "hung" for _, record in lost) else "crash"
        lines = [f"rank {rank} {record.how}\n{record.stacks}" for rank, record in lost]
        lines += [
            f"rank {rank}: {_ending(record)}"
            for rank, record in enumerate(records)
            if isinstance(record, Record)
        ]
        if all(is_engine_crash(record) for _, record in lost) and all(record.errors() for record in whole):
            return _bits(whole, False) or Verdict(ENGINE_CRASH, text="\n".join(lines))
        return Verdict(kind, text="\n".join(lines))
    if expected is not None and (wrong := _invalid(whole, expected)):
        return Verdict(INVALID, wrong.at, wrong.text, wrong.error)
    verdict = (
        _norms(whole)
        or _bits(whole, same_parameters and not is_uneven(whole))  # otherwise the rest of a step may differ
        or _alone(whole)
        or _out_of_step(whole)
        or (None if expected is None else _means(whole, expected, tolerance))
    )
    if verdict is not None:
        return verdict
    errors = [error for record in whole for error in record.errors() if not error.by_user]
    if errors:
        return Verdict(REFUSED, errors[0].at, _endings(whole), _worst(errors))
    if any(record.errors() for record in whole):
        return Verdict(USER_ERROR, text=_endings(whole))
    return Verdict(EQUAL)


def raised_everywhere(records: Sequence[Record | Lost]) -> dict[str, bool]:
    """Labels of the ops at which some rank caught an error of the library's, and every rank caught one.

    The reference raises there, too. From the first op on at which only some ranks raised, nothing is said:
    later values are not compared with a reference (see `_parted_at`).

    Returns:
        By label, whether backward had recomputed layers by then, which may have changed their buffers.
    """
    caught, ours = _caught(_whole(records))
    parted = _parted_at(_whole(records))
    labels = (at for at in sorted(ours) if parted is None or _op_number(at) < parted)
    return {at: any(each[at].recomputed for each in caught) for at in labels}


def _parted_at(records: Sequence[Record]) -> int | None:
    """The number of the first op in which some ranks, but not all, caught an error; one is the library's."""
    caught, ours = _caught(records)
    return min((_op_number(at) for at in ours if not all(at in each for each in caught)), default=None)


def _caught(records: Sequence[Record]) -> tuple[list[dict[str, Event]], set[str]]:
    """The errors that each rank caught, by label; and the labels of the library's errors."""
    caught = [{event.at: event for event in record.events if event.kind == "error"} for record in records]
    return caught, {at for each in caught for at, event in each.items() if not event.by_user}


def _op_number(label: str) -> int:
    """The op of the program that a label is in: 4 for "4.1 model 0"."""
    return int(re.match(r"\d*", label)[0] or 0)


def agreed(first: list[Record], *others: Sequence[Record]) -> list[Record]:
    """The first reference's records without the values that another one contradicts."""
    return functools.reduce(_without_contradicted, others, first)


def _without_contradicted(first: Sequence[Record], second: Sequence[Record]) -> list[Record]:
    return [
        replace(
            record,
            events=[
                replace(
                    event, values=_agreed(event.values, other.values) if _same_place(event, other) else {}
                )
                for event, other in zip(record.events, theirs.events)
            ],
        )
        for record, theirs in zip(first, second)
    ]


def _agreed(values: dict[str, Value | None], others: dict[str, Value | None]) -> dict[str, Value | None]:
    return {name: value for name, value in values.items() if not _wrong(value, others.get(name), 1e-9, 0.0)}


def _same_place(event: Event, other: Event) -> bool:
    return (event.at, event.kind) == (other.at, other.kind)


def without_buffers(records: Sequence[R]) -> list[R]:
    """The records without buffers, for wrappers that do not copy one rank's buffers with each mean."""
    return [
        replace(record, events=[event for event in record.events if event.kind != "buffers"])
        if isinstance(record, Record)
        else record
        for record in records
    ]


def is_uneven(records: Sequence[Record | Lost]) -> bool:
    """True if the program's own errors came on some ranks only."""
    own = [[error.at for error in record.errors() if error.by_user] for record in _whole(records)]
    return any(each != own[0] for each in own)


def _whole(records: Sequence[Record | Lost]) -> list[Record]:
    return [record for record in records if isinstance(record, Record)]


def _norms(records: Sequence[Record]) -> Verdict | None:
    for rank, record in enumerate(records):
        for event in record.events:
            if event.kind != "norm" or not np.isfinite(event.true):
                continue
            if not abs(event.reported - event.true) <= event.within * event.true + 1e-30:
                text = (
                    f"rank {rank}: clip_grad_norm_ said {event.reported:.6g}, the norm was {event.true:.6g}"
                )
                return Verdict("wrong norm", event.at, text)
    return None


def _bits(records: Sequence[Record], same_parameters: bool) -> Verdict | None:
    """Check that all ranks in a backward with data see the same shared values, in the same bits."""
    kinds = ("gradients", "parameters", "buffers") if same_parameters else ("gradients",)
    models = sorted({event.model for record in records for event in record.events})
    verdicts = (_bits_of_model(records, model, kinds) for model in models)
    return next((verdict for verdict in verdicts if verdict is not None), None)


def _bits_of_model(records: Sequence[Record], model: int, kinds: tuple[str, ...]) -> Verdict | None:
    """Follow all ranks from one backward to the next.

    A rank that has no more data sees nothing of the backwards of the others until all have finished. After an
    error of the program it may finish earlier than the program says, so only its record shows when.
    """
    left = [deque(_backwards_of(record, model, kinds)) for record in records]
    active = list(range(len(left)))
    while True:
        for row in zip(*(left[rank].popleft() for rank in active)):
            if name := _differing_name([event for event in row if not event.tainted]):
                return Verdict("ranks differ", row[0].at, _differing(row, active, name))
        if not all(left):
            break
        active = [rank for rank, backwards in enumerate(left) if backwards[0][0].kind == "gradients"]
        active = active or list(range(len(left)))
    alone = [events[0] for backwards in left for events in backwards if events[0].kind == "gradients"]
    if not alone or _died_after(left, records):
        return None
    backwards = [
        sum(each.kind == "gradients" for each in _shared(record, model, kinds)) for record in records
    ]
    text = f"backwards that returned a mean, by rank: {backwards}\n{_endings(records)}"
    return Verdict("a rank went on alone", alone[0].at, text)


def _died_after(left: Sequence[deque[list[Event]]], records: Sequence[Record]) -> bool:
    """True if ranks that had one mean more than the others died right after it.

    Then the others may see that a rank is gone before they receive its last message: all of them raise.
    """
    ahead = [
        rank for rank, backwards in enumerate(left) if any(each[0].kind == "gradients" for each in backwards)
    ]
    if any(len(left[rank]) > 1 or records[rank].raised is None for rank in ahead):
        return False
    behind = (record.raised for rank, record in enumerate(records) if rank not in ahead)
    return all(raised is not None and raised.error == "PeerLostError" for raised in behind)


def _backwards_of(record: Record, model: int, kinds: tuple[str, ...]) -> Iterator[list[Event]]:
    """The events before a rank's first backward, then those from each mean, or the end of its data, on."""
    events: list[Event] = []
    for event in _shared(record, model, kinds):
        if event.kind in ("gradients", "finished"):
            yield events
            events = []
        events.append(event)
    yield events


def _shared(record: Record, model: int, kinds: tuple[str, ...]) -> Iterator[Event]:
    for event in [*record.events, *([] if record.raised is None else [record.raised])]:
        if model in event.made:  # the mean after the error is unknown
            yield Event(event.at, "gradients", model=model, shared=True, tainted=True)
        elif event.model == model and (event.kind == "finished" or (event.shared and event.kind in kinds)):
            yield event


def _differing_name(row: Sequence[Event]) -> str:
    """The name of the values whose bits differ; empty: none."""
    for name in row[0].values if row else ():
        if len({_digest(event.values.get(name)) for event in row}) > 1:
            return name
    return ""


def _invalid(records: Sequence[Record], expected: Sequence[Record]) -> Event | None:
    """The error that ended the reference too, such as a wrong shape: the program is to blame."""
    for record, reference in zip(records, expected):
        ends = [
            None if each.raised is None else (each.raised.at, each.raised.error)
            for each in (record, reference)
        ]
        if reference.raised is not None and not reference.raised.by_user and ends[0] == ends[1]:
            return reference.raised
    return None


def _alone(records: Sequence[Record]) -> Verdict | None:
    """If one rank raised an error of the library's, every other rank must have raised one, too."""
    theirs = [[error for error in record.errors() if not error.by_user] for record in records]
    if not any(theirs) or all(record.errors() for record in records):
        return None
    first = next(errors[0] for errors in theirs if errors)
    return Verdict("a rank raised alone", first.at, _endings(records))


def _out_of_step(records: Sequence[Record]) -> Verdict | None:
    """If an exception of the program ends the backward of some ranks, each rank must raise once for it."""
    is_in_step = False
    for errors in itertools.zip_longest(*(record.errors() for record in records)):
        here = [error for error in errors if error is not None]
        kinds = {(error.at, error.error) for error in here if not error.by_user}
        if len(here) < len(errors) or any(error.at != here[0].at for error in here) or len(kinds) > 1:
            if is_in_step and not any(error.by_user for error in here):
                return Verdict(
                    "ranks out of step after an exception in backward", here[0].at, _endings(records)
                )
            return None
        is_in_step = is_in_step or len({error.by_user for error in here}) > 1
    return None


def _means(records: Sequence[Record], expected: Sequence[Record], tolerance: float) -> Verdict | None:
    parted = _parted_at(records)
    for rank, (record, reference) in enumerate(zip(records, expected)):
        for event, wanted in zip(record.events, reference.events):
            if (event.at, event.kind) != (wanted.at, wanted.kind):
                break  # one of them raised here; from now on the two are at different places
            if parted is not None and _op_number(event.at) >= parted:
                break  # ranks raised at different ops, and the reference does not know with which errors
            if event.kind in ("error", "norm", "finished") or event.tainted or wanted.tainted:
                continue
            floor = max((_scale(value) for value in wanted.values.values()), default=0.0)
            if floor > _TOO_LARGE:
                break  # training has diverged: the reference has values beyond the range of float32
            for name, value in wanted.values.items():
                wrong = _wrong(event.values.get(name), value, tolerance, floor)
                if wrong:
                    what = "wrong mean" if event.shared else "wrong local gradient"
                    kind = what if event.kind == "gradients" else f"wrong {event.kind}"
                    return Verdict(kind, event.at, f"rank {rank}, {name}: {wrong}")
    return None


def _wrong(got: Value | None, wanted: Value | None, tolerance: float, floor: float) -> str:
    """The error of a value, in words; empty: none. A missing gradient equals one of zeros."""
    if wanted is None and got is None:
        return ""
    zeros = np.zeros_like((got or wanted).sample)  # type: ignore[union-attr]
    have, want = (zeros if value is None else value.sample for value in (got, wanted))
    if have.shape != want.shape:
        return f"expected {want.size} elements, got {have.size}"
    # A gradient that is a small sum of large terms has the absolute error of those terms.
    largest = max(np.abs(want[np.isfinite(want)]).max(initial=0.0), max(1e-2, tolerance) * floor)
    allowed = tolerance * largest + 1e-30
    with np.errstate(all="ignore"):
        is_right = (np.abs(have - want) <= allowed) | (have == want) | (np.isnan(have) & np.isnan(want))
    if is_right.all():
        return ""
    place = int(np.argmin(is_right))
    error = np.abs(have - want)[~is_right].max()
    return (
        f"element {place}: expected {want[place]:.6g}, got {have[place]:.6g} "
        f"({(~is_right).sum()} of {is_right.size} sampled are wrong, by up to {error:.3g})"
    )


def _scale(value: Value | None) -> float:
    if value is None:
        return 0.0
    finite = value.sample[np.isfinite(value.sample)]
    return float(np.abs(finite).max(initial=0.0))


def _digest(value: Value | None) -> bytes:
    return b"" if value is None else value.digest


def _differing(row: Sequence[Event], ranks: Sequence[int], name: str) -> str:
    lines = [f"{row[0].kind} of {name} after op {row[0].at}:"]
    samples = [None if event.values.get(name) is None else event.values[name].sample for event in row]  # type: ignore[union-attr]
    place = 0
    if all(sample is not None and sample.shape == samples[0].shape for sample in samples):  # type: ignore[union-attr]
        stacked = np.stack([sample for sample in samples if sample is not None])
        place = int(np.argmax((stacked != stacked[0]).any(axis=0)))
    for rank, event, sample in zip(ranks, row, samples):
        text = "None" if sample is None else f"element {place} is {sample[place] if sample.size else '-'}"
        lines.append(f"  rank {rank} (op {event.at}): {text}")
    return "\n".join(lines)


def _worst(errors: Sequence[Event]) -> str:
    """The most informative error: that of a lost peer only follows from another one."""
    echoes = ("PeerLostError", "GroupClosedError", "DeadlineError", "DistBackendError")
    return next((error.error for error in errors if error.error not in echoes), errors[0].error)


def _ending(record: Record) -> str:
    lines = [
        f"{error.error} at op {error.at}{' (its own)' if error.by_user else ''}: {error.text}"
        for error in record.errors()
    ]
    return "; ".join([*lines, "reached the end"] if record.raised is None else lines)


def _endings(records: Sequence[Record]) -> str:
    return "\n".join(f"rank {rank}: {_ending(record)}" for rank, record in enumerate(records))
