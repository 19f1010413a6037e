"""The events that a rank records while it trains, and the layout of a record in memory.

A record has 32 bytes. Some events are recorded by the core, the others by Python. `Event` has the same
numbers as `Event` in cpp/core/recorder.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

RECORD = struct.Struct("<qIHHqq")
RECORD_BYTES = RECORD.size
_MODEL_SHIFT = 40
_FLOAT, _INTEGER = struct.Struct("<d"), struct.Struct("<q")


class Event(IntEnum):
    """The event of a record; its two numbers are in brackets. Times are CLOCK_MONOTONIC, in nanoseconds."""

    POSTED = 1
    """This rank has posted a bucket (its number, 0)."""
    REDUCED = 2
    """It has reduced chunks of a bucket (when it began, bucket << 32 | number of chunks)."""
    WAITED = 3
    """It has waited for other ranks (when it began, the last rank to arrive, or -1)."""
    COPIED_BACK = 4
    """It has copied means to where gradients lie (when it began, 0)."""
    FORWARD_BEGAN = 5
    """(iteration of a model, samples << 1 | whether its backward is averaged); 0 samples: unknown"""
    FORWARD_ENDED = 6
    """(iteration of a model, 0)"""
    BACKWARD_BEGAN = 7
    """(iteration of a model, 0)"""
    BACKWARD_ENDED = 8
    """It has all its gradients, and waits for the others (iteration of a model, whether it has no data)."""
    AVERAGING_ENDED = 9
    """(iteration of a model, whether it raised)"""
    WROTE_BACK = 10
    """Python has written the means back (when it began, 0)."""
    SYNCED_BUFFERS = 11
    """(when it began, 0)"""
    OPTIMIZER_BEGAN = 12
    OPTIMIZER_ENDED = 13
    DATA_BEGAN = 14
    """A data loader was asked for a batch."""
    DATA_ENDED = 15
    BATCH = 17
    """A wrapped model was given a batch to train on (its first dimension, its number of elements)."""
    LOCAL_BACKWARD_BEGAN = 18
    """A backward in no_sync() began (the iteration of a model that its gradients belong to, 0)."""
    LOCAL_BACKWARD_ENDED = 19
    """(iteration of a model, whether it raised)"""
    LOGGED = 24
    """The program has logged a value (the number of its name, the bits of a float64)."""
    NORM = 25
    """The 2-norm of the mean gradient, once a second (iteration of a model, the bits of a float64)."""
    NONFINITE = 26
    """Gradients held an infinity or a NaN (iteration of a model, number of them << 32 | the first rank)."""


class Record(NamedTuple):
    time_ns: int
    event: int
    thread: int
    first: int
    second: int


def backward_id(model: int, number: int) -> int:
    """One number for a backward of a model. Each process counts its own models and backward passes."""
    return model << _MODEL_SHIFT | number


def backward_of(identity: int) -> tuple[int, int]:
    return identity >> _MODEL_SHIFT, identity & ((1 << _MODEL_SHIFT) - 1)


def float_bits(value: float) -> int:
    return int(_INTEGER.unpack(_FLOAT.pack(value))[0])


def bits_float(bits: int) -> float:
    return float(_FLOAT.unpack(_INTEGER.pack(bits))[0])


def unpack(ring: bytes, count: int) -> list[Record]:
    """The complete records of a ring, oldest first."""
    capacity = len(ring) // RECORD_BYTES
    first = max(0, count - capacity)
    split = first % capacity * RECORD_BYTES
    return unpack_run(ring[split:] + ring[:split], first, count)


def unpack_run(data: bytes, first: int, end: int) -> list[Record]:
    """The complete records among consecutive ones, with indices from `first` up to `end`."""
    found = []
    for index, fields in zip(range(first, end), RECORD.iter_unpack(data)):
        time_ns, sequence, event, thread, one, two = fields
        if sequence == (index + 1) & 0xFFFFFFFF:
            found.append(Record(time_ns, event, thread, one, two))
    return found


def pack(records: Iterable[Record], capacity: int) -> bytes:
    """A ring that holds these records, as the core would write it; for tests and tools."""
    ring = bytearray(capacity * RECORD_BYTES)
    for index, record in enumerate(records):
        fields = (record.time_ns, (index + 1) & 0xFFFFFFFF, *record[1:])
        RECORD.pack_into(ring, index % capacity * RECORD_BYTES, *fields)
    return bytes(ring)
