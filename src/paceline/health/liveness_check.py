"""Asks all ranks of a control channel whether they answer and what they are doing, when a collective is late.

The thread of the channel answers for its rank, whatever the rank's program does. So a rank that computes can
be distinguished from one that does not answer because its process is stopped or holds the GIL. The kernel of
such a process still acknowledges the question. If no kernel does, the question has not arrived: the network
is cut or slow, or the host is gone. The hub asks all ranks, in one round for all that ask at the same time.
Nothing is sent unless a rank asks.

    a rank that asks            ASK to its parent; in a tree the parent forwards it to the hub
    the hub                     ASK to all, with the number of the round
    every rank                  ANSWER to the hub: what it is doing
    the hub                     SEEN to all: the ranks that have not answered in time, and all answers
    in a tree, a rank between   SEEN to the ranks below it, saying that the hub is silent, if no SEEN arrives

So a rank that receives no SEEN knows that its parent does not answer.

A rank whose deadline has passed gives up, and may be ending its process while others still wait. It does not
answer then, but is not to blame. So for a while its last answer replaces the missing one. If it was the hub
that gave up, the others use the result of its last round.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.health.channel_tree import HUB, Neighbours
from paceline.rendezvous.frames import Frame
from paceline.rendezvous.messages import MessageError, read_object, write_object

ASK_WITHIN_S = 0.5
"""Most seconds that a rank waits for the hub's result. Other ranks of its host must not give up meanwhile, so
they wait longer (`between_hosts.peer_waits`)."""
ASK_AGAIN_WITHIN_S = 1.5
"""For so many seconds a rank asks again if the question has not reached a host. As a rule it is known by then
whether that host is lost."""
_ANSWER_WITHIN_S = 0.35  # the part of ASK_WITHIN_S for which the hub waits
_COUNTS_FOR_S = 30.0  # how long the last answer of a rank that has given up replaces a missing one
_MOST_RANKS = 32
_LONGEST_WORDS = 160


class Progress(NamedTuple):
    """How many of the bytes sent to a neighbour have arrived.

    Attributes:
        sent: Bytes sent or queued so far.
        confirmed: How many of them the kernel of its host has acknowledged.
    """

    sent: int
    confirmed: int


class Activity(NamedTuple):
    """What a rank is doing.

    Attributes:
        text: In words: "in backward of iteration 3".
        is_waiting: Whether it waits for others, or has given up on them: then it is not to blame.
        has_given_up: Whether its deadline has passed.
    """

    text: str = ""
    is_waiting: bool = False
    has_given_up: bool = False


@dataclass(frozen=True)
class Answer:
    rank: int
    round: int
    doing: str
    is_waiting: bool
    at: str
    has_given_up: bool = False

    def pack(self) -> bytes:
        return write_object(vars(self))

    @classmethod
    def unpack(cls, raw: bytes) -> Answer:
        """Raises MessageError if `raw` is not an answer."""
        fields = {
            "rank": int,
            "round": int,
            "doing": str,
            "is_waiting": bool,
            "at": str,
            "has_given_up": bool,
        }
        return cls(**read_object(raw, fields))


@dataclass(frozen=True)
class Seen:
    """The result of a round.

    Attributes:
        silent: The ranks that have not answered, although their kernels have acknowledged the question.
        answers: The answers of the others.
        unreached: The ranks that have not answered, and whose kernels have not acknowledged the question.
    """

    silent: tuple[int, ...] = ()
    answers: Mapping[int, Answer] = field(default_factory=dict)
    unreached: tuple[int, ...] = ()

    def without_answers(self) -> Seen:
        return Seen(self.silent, unreached=self.unreached)

    def pack(self) -> bytes:
        by_interest = sorted(self.answers.values(), key=lambda answer: (answer.is_waiting, answer.rank))
        return write_object(
            {
                "silent": list(self.silent[:_MOST_RANKS]),
                "answers": [vars(each) for each in by_interest[:_MOST_RANKS]],
                "unreached": list(self.unreached[:_MOST_RANKS]),
            }
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Seen:
        """Raises MessageError if `raw` is not a result."""
        reported = read_object(raw, {"silent": list, "answers": list, "unreached": list})
        if not all(type(rank) is int for rank in [*reported["silent"], *reported["unreached"]]):
            raise MessageError("silent or unreached holds something else than ranks")
        if not all(type(each) is dict for each in reported["answers"]):
            raise MessageError("answers holds something else than answers")
        answers = [Answer.unpack(write_object(each)) for each in reported["answers"]]
        return cls(
            tuple(reported["silent"]), {each.rank: each for each in answers}, tuple(reported["unreached"])
        )


class LivenessCheck:
    """One rank's part in asking and answering. The caller holds the channel's lock, except in `ask`.

    Attributes:
        activity: What this rank is doing, for others.
        ends_at_s: The time at which `end_round` has something to do.
    """

    def __init__(
        self,
        rank: int,
        neighbours: Neighbours,
        ranks: Sequence[int],
        send: Callable[[int, Frame, bytes], None],
        progress_to: Callable[[int], Progress | None],
        lock: threading.RLock,
    ) -> None:
        self.activity = Activity()
        self.ends_at_s = math.inf
        self._rank, self._parent, self._below = rank, neighbours.parent, neighbours.below
        self._ranks, self._send, self._progress_to = ranks, send, progress_to
        self._asked: dict[int, int] = {}  # bytes sent to each neighbour, up to and with the last question
        self._news = threading.Condition(lock)
        self._seen, self._num_seen, self._seen_at_s = Seen(), 0, -math.inf
        self._num_stopped = 0
        self._round = 0
        self._liveness: dict[int, Answer] = {}
        self._last_answers: dict[
            int, tuple[float, Answer]
        ] = {}  # at the hub: the last answer of each rank, and when it came
        self._gone: frozenset[int] = frozenset()

    def ask(self, gone: Callable[[], frozenset[int]]) -> Seen:
        """What all ranks are doing. Blocks `ASK_WITHIN_S` at most."""
        with self._news:
            before, stopped = self._num_seen, self._num_stopped
            if self._parent is None:
                self.begin_round(gone())
            elif self._parent in gone():
                return Seen()
            else:
                self._ask(self._parent, b"")
            self._news.wait_for(
                lambda: self._num_seen != before or self._num_stopped != stopped, ASK_WITHIN_S
            )
            if self._num_seen != before:
                return self._without_own(self._seen)
            if self._parent is None:  # the thread of the channel has not ended the round yet
                return self._without_own(self._close())
            return self._without_own(self._seen_of_parent())

    def stop_asking(self) -> None:
        self._num_stopped += 1
        self._news.notify_all()

    def receive(self, rank: int, kind: Frame, text: bytes, gone: Callable[[], frozenset[int]]) -> None:
        is_from_parent = rank == self._parent
        if kind is Frame.ASK and is_from_parent:
            self._answer(int.from_bytes(text, "little"))
            for child in self._below:
                self._send(child, kind, text)
        elif kind is Frame.ASK and self._parent is None:
            self.begin_round(gone())
        elif kind is Frame.ASK and self._parent is not None:
            self._ask(self._parent, b"")
            # After the hub ends its round, and before the ranks that ask give up.
            self.ends_at_s = min(self.ends_at_s, time.monotonic() + (_ANSWER_WITHIN_S + ASK_WITHIN_S) / 2)
        elif kind is Frame.ANSWER and not is_from_parent:
            self._take(rank, text)
        elif kind is Frame.SEEN and is_from_parent:
            self._publish(Seen.unpack(text), text)
        else:
            raise MessageError("it sends what only the hub may send")

    def begin_round(self, gone: frozenset[int]) -> None:
        if self.ends_at_s < math.inf:
            return
        self.ends_at_s = time.monotonic() + _ANSWER_WITHIN_S
        self._round = (self._round + 1) % (1 << 31)
        self._liveness, self._gone = {}, gone
        for child in self._below:
            self._ask(child, self._round.to_bytes(4, "little"))
        self._end_if_all_are_there()

    def end_round(self, now: float) -> None:
        """Publish the result if it is time: at the hub, and in a tree at ranks between it and the others."""
        if now < self.ends_at_s:
            return
        if self._parent is None:
            self._close()
        else:
            seen = self._seen_of_parent()
            self._publish(seen, seen.pack())

    def _seen_of_parent(self) -> Seen:
        assert self._parent is not None
        hub = self._seen.answers.get(HUB)
        if hub is not None and hub.has_given_up and _is_recent(self._seen_at_s):
            return self._seen
        return self._seen_silent({self._parent: self._parent})

    def _seen_silent(self, ways: Mapping[int, int], answers: Mapping[int, Answer] | None = None) -> Seen:
        is_reached = {way: self._is_reached(way) for way in set(ways.values())}
        silent = tuple(rank for rank, way in ways.items() if is_reached[way] is True)
        unreached = tuple(rank for rank, way in ways.items() if is_reached[way] is False)
        return Seen(silent, answers or {}, unreached)

    def _ask(self, neighbour: int, number: bytes) -> None:
        self._send(neighbour, Frame.ASK, number)
        progress = self._progress_to(neighbour)
        self._asked[neighbour] = 0 if progress is None else progress.sent

    def _is_reached(self, neighbour: int) -> bool | None:
        """Whether that host's kernel has acknowledged the last question; None if the connection has ended."""
        progress = self._progress_to(neighbour)
        return None if progress is None else progress.confirmed >= self._asked[neighbour]

    # --- the hub ---

    def _take(self, child: int, text: bytes) -> None:
        answer = Answer.unpack(text)
        if answer.rank not in self._below[child]:
            raise MessageError(f"it answers for rank {answer.rank}")
        if self._parent is not None:
            self._send(self._parent, Frame.ANSWER, text)
        elif self.ends_at_s < math.inf and answer.round == self._round:
            self._liveness[answer.rank] = answer
            self._last_answers[answer.rank] = time.monotonic(), answer
            self._end_if_all_are_there()

    def _awaited(self) -> list[int]:
        return [rank for rank in self._ranks if rank != self._rank and rank not in self._gone]

    def _end_if_all_are_there(self) -> None:
        if all(rank in self._liveness for rank in self._awaited()):
            self._close()

    def _close(self) -> Seen:
        self.ends_at_s = math.inf
        missing = [rank for rank in self._awaited() if rank not in self._liveness]
        # A rank whose answers pass through a silent rank may have answered.
        hidden = {rank for child in missing for rank in self._below.get(child, ()) if rank != child}
        self._liveness[self._rank] = self._own(self._round)
        for rank in missing:
            at_s, answer = self._last_answers.get(rank, (-math.inf, None))
            if answer is not None and answer.has_given_up and _is_recent(at_s):
                self._liveness[rank] = answer
        mute = [rank for rank in missing if rank not in hidden and rank not in self._liveness]
        way_to = {rank: child for child, ranks in self._below.items() for rank in ranks}
        seen = self._seen_silent({rank: way_to[rank] for rank in mute}, dict(self._liveness))
        self._publish(seen, seen.pack())
        return seen

    # --- every rank ---

    def _answer(self, number: int) -> None:
        assert self._parent is not None
        self._send(self._parent, Frame.ANSWER, self._own(number).pack())

    def _publish(self, seen: Seen, text: bytes) -> None:
        self._seen, self._seen_at_s, self.ends_at_s = seen, time.monotonic(), math.inf
        self._num_seen += 1
        self._news.notify_all()
        for child in self._below:
            self._send(child, Frame.SEEN, text)

    def _own(self, number: int) -> Answer:
        activity = self.activity
        text = activity.text[:_LONGEST_WORDS]
        place = _place_of_main_thread()
        return Answer(self._rank, number, text, activity.is_waiting, place, activity.has_given_up)

    def _without_own(self, seen: Seen) -> Seen:
        silent = tuple(rank for rank in seen.silent if rank != self._rank)
        unreached = tuple(rank for rank in seen.unreached if rank != self._rank)
        answers = {rank: each for rank, each in seen.answers.items() if rank != self._rank}
        return Seen(silent, answers, unreached)


def _is_recent(at_s: float) -> bool:
    return time.monotonic() - at_s <= _COUNTS_FOR_S


def _place_of_main_thread() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    place = f"{frame.f_code.co_name} in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return place[:_LONGEST_WORDS]
