"""Encodes and decodes what ranks send while a group forms: JSON objects, and lists of byte strings.

Reading arbitrary bytes gives values of the expected types, or raises one error that says what is wrong with
them. An unknown peer's bytes must not end a job, and a rank's bad bytes must be reported as that rank's.
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
    """What a rank sends when it connects."""

    rank: int
    world_size: int
    job_id: str
    name: str
    pid: int


_HELLO_FIELDS = {"rank": int, "world_size": int, "job_id": str, "name": str, "pid": int}


def write_object(values: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(values)).encode()


def read_object(raw: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    """The values of a JSON object that has exactly these fields, with these types."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:  # ValueError: also for bytes that are not UTF-8
        raise MessageError(f"{_quote(raw)} is not JSON ({type(error).__name__})") from error
    if type(values) is not dict or values.keys() != fields.keys():
        raise MessageError(f"{_quote(raw)} is no object with {', '.join(fields)}")
    for name, kind in fields.items():
        if type(values[name]) is not kind:
            raise MessageError(f"{name} in {_quote(raw)} is not of type {kind.__name__}")
    return values


def read_hello(raw: bytes) -> Hello:
    """Raises MessageError if `raw` is no hello."""
    hello = Hello(**read_object(raw, _HELLO_FIELDS))
    if not all(abs(number) < _LARGEST_NUMBER for number in (hello.rank, hello.world_size, hello.pid)):
        raise MessageError(f"{_quote(raw)} holds a number that is too large")
    return hello


def write_failure(error: RendezvousError) -> bytes:
    return write_object({"text": str(error), "missing": list(error.fields.get("missing", ()))})


def read_failure(raw: bytes) -> RendezvousError:
    """The error as rank 0 raised it. Raises MessageError if `raw` holds none."""
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
    """Inverse of `join_payloads`. Raises MessageError if there are not exactly `count` payloads."""
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
    """Every rank's `values`, by rank; fields and types must be the same on all ranks. Collective."""
    payloads = exchange.all_gather(write_object(values), timeout_s)
    fields = {name: type(value) for name, value in values.items()}
    return read_of_ranks(payloads, lambda payload: read_object(payload, fields))


def read_of_ranks(payloads: Sequence[bytes], read: Callable[[bytes], T]) -> list[T]:
    """The results of `read` for the payloads of all ranks, by rank; the error names the first bad rank."""
    results: list[T] = []
    try:
        for payload in payloads:
            results.append(read(payload))  # noqa: PERF401 (the error needs the number of those read)
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
