"""Checks once, at wrapping, that all ranks wrap the same model.

Every rank describes its model as plain data and exchanges a digest of it. Only if digests differ, the full
descriptions are exchanged as JSON, so that every rank can name the first difference by parameter and rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigError, ModelMismatchError, PacelineError, format_ranks
from paceline.health import exit_reports
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.messages import read_of_ranks

_PATIENCE_S = 10.0  # of a rank that only waits to report its failure to the others


@dataclass(frozen=True)
class TensorDescription:
    """A parameter or a buffer, with the properties that must be equal on all ranks.

    Attributes:
        device: A kind ("cpu", "cuda"), not a number: ranks may use different GPUs.
        strides: In elements; empty for the usual row-major ones.
        requires_grad: None for a buffer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    strides: tuple[int, ...] = ()
    requires_grad: bool | None = None

    def __str__(self) -> str:
        text = f"{self.name}, shape {self.shape}, {self.dtype} on {self.device}"
        if self.strides:
            text += f", strides {self.strides}"
        return text if self.requires_grad is None else f"{text}, trainable={self.requires_grad}"


@dataclass(frozen=True)
class ModelDescription:
    """What must be equal on all ranks: parameters and buffers in registration order, and options.

    Attributes:
        failure: Why this rank has no model to describe; empty if it has one.
        doing: What the ranks do, or failed to do, in words; empty: they wrap the model.
    """

    parameters: tuple[TensorDescription, ...]
    buffers: tuple[TensorDescription, ...] = ()
    options: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    doing: str = ""

    def to_json(self) -> bytes:
        return json.dumps(self, default=vars, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, payload: bytes) -> ModelDescription:
        plain = json.loads(payload)
        return cls(
            parameters=tuple(_tensor(entry) for entry in plain["parameters"]),
            buffers=tuple(_tensor(entry) for entry in plain["buffers"]),
            options=dict(plain["options"]),
            failure=str(plain["failure"]),
            doing=str(plain["doing"]),
        )


def check_agreement(description: ModelDescription, exchange: Exchange, timeout_s: float) -> None:
    """Raise on every rank if any two ranks describe different models. Collective.

    Raises:
        ModelMismatchError: Names the first difference and the ranks on each side of it.
        ConfigError: Some rank refused its arguments; quotes that rank's error.
        RendezvousError: A rank sent something that is no description; names the rank.
    """
    payload = description.to_json()
    digests = exchange.all_gather(hashlib.sha256(payload).digest(), timeout_s)
    if len(set(digests)) == 1:
        return
    payloads = exchange.all_gather(payload, timeout_s)
    models = read_of_ranks(payloads, ModelDescription.from_json)
    raise _failure_of(models) or first_difference(models)


@contextlib.contextmanager
def reporting_to_peers(
    find: Callable[[], tuple[Exchange, float] | None], doing: str = "wrap the model"
) -> Iterator[None]:
    """Report a ConfigError raised in this context to the ranks that wait in `check_agreement`, so that they
    raise at once.
    """
    exit_reports.install()
    try:
        yield
    except ConfigError as error:
        with contextlib.suppress(PacelineError):
            found = find()
            if found is not None and found[0].world_size > 1:
                exchange, timeout_s = found
                failed = ModelDescription((), failure=str(error), doing=doing)
                check_agreement(failed, exchange, min(timeout_s, _PATIENCE_S))
        raise


def _failure_of(models: Sequence[ModelDescription]) -> ConfigError | None:
    failed = [rank for rank, model in enumerate(models) if model.failure]
    if not failed:
        return None
    return ConfigError(
        f"{format_ranks(failed).capitalize()} of {len(models)} could not {models[failed[0]].doing}.",
        seen=by_ranks([model.failure or "waited for the others" for model in models]),
        expected="the same arguments, and the same model, on every rank",
        likely="an argument, or the model, depends on the rank",
        hint=f"mend what {format_ranks(failed)} was given",
        ranks=tuple(failed),
    )


def first_difference(models: Sequence[ModelDescription]) -> ModelMismatchError:
    """The error for the first difference between these models, one per rank."""
    error = _tensors_difference("parameter", [model.parameters for model in models])
    error = error or _tensors_difference("buffer", [model.buffers for model in models])
    doing = models[0].doing or "wrap the model"
    return error or _options_difference([model.options for model in models], doing)


def _tensors_difference(
    kind: str, models: Sequence[tuple[TensorDescription, ...]]
) -> ModelMismatchError | None:
    for place in range(max(map(len, models))):
        entries = [model[place] if place < len(model) else None for model in models]
        if len(set(entries)) > 1:
            return _difference_at(kind, place, entries, models)
    return None


def _difference_at(
    kind: str,
    place: int,
    entries: Sequence[TensorDescription | None],
    models: Sequence[tuple[TensorDescription, ...]],
) -> ModelMismatchError:
    present = [entry for entry in entries if entry is not None]
    name = present[0].name
    what, likely = _kind_of_difference(entries, models)
    seen = by_ranks(
        [str(entry) if entry else f"no such {kind}: the model ends before it" for entry in entries]
    )
    return ModelMismatchError(
        f"The replicas of the model differ at {kind} '{name}': {what}.",
        where=_place(kind, place, [len(model) for model in models]),
        seen=seen,
        likely=likely,
        hint="build the same model on every rank, from the same arguments; print it on each rank to compare",
        parameter=name,
        place=place,
    )


def _kind_of_difference(
    entries: Sequence[TensorDescription | None], models: Sequence[tuple[TensorDescription, ...]]
) -> tuple[str, str]:
    other_code = "ranks built the model from different arguments, or run different code"
    names = [{entry.name for entry in model} for model in models]
    if None in entries or len({entry.name for entry in entries if entry}) > 1:
        if all(one == names[0] for one in names):
            return (
                "the order differs",
                "layers are registered in an order that depends on a set, a hash or the rank",
            )
        return "some ranks lack it", other_code
    fields: list[tuple[str, Callable[[TensorDescription], object], str]] = [
        ("the shape differs", lambda entry: entry.shape, other_code),
        (
            "the dtype differs",
            lambda entry: entry.dtype,
            "it was converted to another dtype on some ranks only",
        ),
        (
            "the device differs",
            lambda entry: entry.device,
            "some ranks found no GPU, or moved the model later",
        ),
        (
            "trainable differs",
            lambda entry: entry.requires_grad,
            "a layer is frozen or unfrozen on some ranks only",
        ),
        (
            "the memory format differs",
            lambda entry: entry.strides,
            ".to(memory_format=...) or a transposed weight on some ranks only",
        ),
    ]
    for what, value, likely in fields:
        if len({value(entry) for entry in entries if entry}) > 1:
            return what, likely
    raise AssertionError("entries do not differ")


def _options_difference(options: Sequence[dict[str, str]], doing: str) -> ModelMismatchError:
    every = sorted({key for option in options for key in option})
    keys = [key for key in every if len({option.get(key) for option in options}) > 1]
    which = " and ".join(keys)
    rows = [", ".join(f"{key}={option.get(key, 'absent')}" for key in keys) for option in options]
    return ModelMismatchError(
        f"The ranks {doing} with different arguments: {which} differ{'s' * (len(keys) == 1)}.",
        seen=by_ranks(rows),
        likely="an argument that depends on the rank",
        hint=f"pass the same {which} on every rank",
        parameter=keys[0],
    )


def by_ranks(texts: Sequence[str]) -> str:
    """One line for each distinct text, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "\n".join(f"{format_ranks(who)}: {text}" for text, who in ranks.items())


def _place(kind: str, place: int, counts: Sequence[int]) -> str:
    if len(set(counts)) == 1:
        return f"{kind} {place + 1} of {counts[0]}, in registration order"
    numbers = " or ".join(str(count) for count in sorted(set(counts)))
    return f"{kind} {place + 1}, in registration order; the ranks have {numbers} {kind}s"


def _tensor(entry: dict[str, object]) -> TensorDescription:
    shape, strides = entry["shape"], entry["strides"]
    assert isinstance(shape, list) and isinstance(strides, list)
    return TensorDescription(
        name=str(entry["name"]),
        shape=tuple(shape),
        dtype=str(entry["dtype"]),
        device=str(entry["device"]),
        strides=tuple(strides),
        requires_grad=None if entry["requires_grad"] is None else bool(entry["requires_grad"]),
    )
