"""The report of one rank on its run of a program. Independent of the framework.

A record is a list of events in order, and how the program ended. Arrays are numpy's: a digest of all bytes,
by which ranks are compared with each other, and a sample of values, which is compared with the reference.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_MOST_VALUES = 2048


@dataclass(frozen=True)
class Value:
    """One array of an event.

    Attributes:
        digest: Of all bytes, the shape and the dtype.
        sample: Some of its elements: all of them if they are few.
    """

    digest: bytes
    sample: np.ndarray[Any, Any]

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> Value:
        whole = np.ascontiguousarray(array)
        digest = hashlib.blake2b(whole.tobytes(), digest_size=8, person=str(whole.dtype).encode()[:16])
        digest.update(repr(whole.shape).encode())
        flat = whole.reshape(-1)
        if flat.size > _MOST_VALUES:
            flat = np.concatenate([flat[:256], flat[-256:], flat[:: flat.size // 1024]])
        return cls(digest.digest(), flat.copy())


@dataclass
class Event:
    """Something that a rank saw.

    Attributes:
        at: Label of the op; "3#1" when a loop has reached it a second time.
        kind: "gradients", "parameters", "buffers", "input" and a number (the gradient of an input), "norm",
            "error" or "finished" (no data left).
        values: By name; None: the parameter has no gradient.
        model: The model with these values, or without further data.
        shared: All ranks must see the same bits.
        tainted: These values may be anything: an error came before, and gradients were not cleared.
        reported, true: Of a norm: the subject's result, and the true norm.
        within: Of a norm: how far apart the two may be, relative to it.
        error, text: Of an error: its type and its message.
        by_user: The error is one that the program itself raised.
        recomputed: Of an error in a backward: it had recomputed layers by then.
        made: Of an error in a backward of several models: those whose means had come by then.
    """

    at: str
    kind: str
    values: dict[str, Value | None] = field(default_factory=dict)
    model: int = 0
    shared: bool = False
    tainted: bool = False
    reported: float = 0.0
    true: float = 0.0
    within: float = 0.0
    error: str = ""
    text: str = ""
    by_user: bool = False
    recomputed: bool = False
    made: list[int] = field(default_factory=list)


@dataclass
class Record:
    """The events of one rank in a program.

    Attributes:
        events: In order.
        raised: The error that ended the program; None: it reached its end.
    """

    events: list[Event] = field(default_factory=list)
    raised: Event | None = None

    def errors(self) -> list[Event]:
        """The errors that the program caught, and the one that ended it."""
        caught = [event for event in self.events if event.kind == "error"]
        return caught if self.raised is None else [*caught, self.raised]


@dataclass(frozen=True)
class Lost:
    """Replaces a record if the process of this rank ended, or did not answer in time.

    Attributes:
        how: "hung", or the signal or status.
        stacks: Its output, with its stacks.
    """

    how: str
    stacks: str = ""
