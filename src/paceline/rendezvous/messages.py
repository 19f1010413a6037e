"""What ranks tell each other while a group forms, as bytes and back: JSON objects, and lists of byte strings.

Whatever bytes come, reading them gives values of the expected kinds or raises one error that says what is
wrong with them: an unknown peer's bytes must not end a job, and another rank's must be told as that rank's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.errors import RendezvousError
from paceline.rendezvous.exchange import Exchange

T = TypeVar("T")

_SIZE_BYTES = 8
_LARGEST_NUMBER = 1 << 31
_LONGEST_QUOTE = 60


class MessageError(ValueError): ...


@dataclass(frozen=True)
class Hello:
    """What a rank says when it connects."""

    rank: int
    world_size: int
    job_id: str
    name: str
    pid: int


_HELLO_FIELDS = {"rank": int, "world_size": int, "job_id": str, "name": str, "pid": int}


def write_object(values: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(values)).encode()


def read_object(raw: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    """The values of a JSON object that has these fields, of these types, and no others."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
        raise MessageError(f"{_quote(raw)} is not JSON ({type(error).__name__})") from error
    if type(values) is not dict or values.keys() != fields.keys():
        raise MessageError(f"{_quote(raw)} is no object with {', '.join(fields)}")
    for name, kind in fields.items():
        if type(values[name]) is not kind:
            raise MessageError(f"{name} in {_quote(raw)} is not of type {kind.__name__}")
    return values


def read_hello(raw: bytes) -> Hello:
    """Raises MessageError if it is none."""
    hello = Hello(**read_object(raw, _HELLO_FIELDS))
    if not all(abs(number) < _LARGEST_NUMBER for number in (hello.rank, hello.world_size, hello.pid)):
        raise MessageError(f"{_quote(raw)} holds a number that is too large")
    return hello


def write_failure(error: RendezvousError) -> bytes:
    return write_object({"text": str(error), "missing": list(error.fields.get("missing", ()))})


def read_failure(raw: bytes) -> RendezvousError:
    """Rank 0's error, as it was there. Raises MessageError if it is none."""
    reported = read_object(raw, {"text": str, "missing": list})
    if not all(type(rank) is int for rank in reported["missing"]):
        raise MessageError(f"{_quote(raw)} does not name ranks")
    summary, _, rest = reported["text"].partition("\n")
    return RendezvousError(
        f"Rank 0 gave up: {summary}", seen=rest.strip(), missing=tuple(reported["missing"])
    )


def join_payloads(payloads: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(_SIZE_BYTES, "little") + part for part in payloads)


def split_payloads(joined: bytes, count: int) -> list[bytes]:
    """What `join_payloads` joined. Raises MessageError if it is not `count` of them."""
    payloads: list[bytes] = []
    at = 0
    for _ in range(count):
        begin = at + _SIZE_BYTES
        at = begin + int.from_bytes(joined[at:begin], "little")
        if at > len(joined) or begin > len(joined):
            raise MessageError(f"{len(joined)} bytes end within {count} payloads")
        payloads.append(joined[begin:at])
    if at != len(joined):
        raise MessageError(f"{len(joined) - at} bytes come after {count} payloads")
    return payloads


def gather_objects(exchange: Exchange, values: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Every rank's `values`, by rank; they have the same fields and types on all ranks. Collective."""
    payloads = exchange.all_gather(write_object(values), timeout_s)
    fields = {name: type(value) for name, value in values.items()}
    return read_of_ranks(payloads, lambda payload: read_object(payload, fields))


def read_of_ranks(payloads: Sequence[bytes], read: Callable[[bytes], T]) -> list[T]:
    """What `read` makes of the payloads of all ranks, by rank."""
    results: list[T] = []
    try:
        for payload in payloads:
            results.append(read(payload))  # noqa: PERF401 (how many were read tells whose could not be)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise unreadable(len(results), len(payloads), error) from error
    return results


def unreadable(rank: int, world_size: int, error: Exception) -> RendezvousError:
    return RendezvousError(
        f"Rank {rank} of {world_size} sent something else than was expected of it.",
        seen=str(error) or type(error).__name__,
        likely="it runs another version of Paceline, or an unknown peer writes where the ranks meet "
        "(torch's store accepts the words of every process that reaches MASTER_PORT)",
        hint="install the same version everywhere, and keep the port where the ranks meet from unknown peers",
        missing=(rank,),
    )


def _quote(raw: bytes) -> str:
    return f"{raw[:_LONGEST_QUOTE]!r}{'...' if len(raw) > _LONGEST_QUOTE else ''}"
