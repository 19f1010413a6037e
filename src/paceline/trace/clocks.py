"""Puts the recordings of several hosts on one clock.

No rank finishes a backward before every rank has reached its end. So each backward bounds the offset between
the clocks of two hosts from both sides: the last rank of host B arrived before the first rank of host A went
on, and the reverse. Over many backward passes the bounds come as close as the time of one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.trace.timeline import BackwardKey, RankTimeline


def on_one_clock(timelines: Sequence[RankTimeline]) -> list[RankTimeline]:
    hosts: dict[str, list[RankTimeline]] = {}
    for each in timelines:
        hosts.setdefault(each.recording.header.boot, []).append(each)
    first = next(iter(hosts.values()), [])
    ahead = {boot: ahead_ns(first, others) if others is not first else 0 for boot, others in hosts.items()}
    return [each.shifted(-ahead[each.recording.header.boot]) for each in timelines]


def ahead_ns(host: Sequence[RankTimeline], other: Sequence[RankTimeline]) -> int:
    """How far the clock of the other host is ahead of this host's, in nanoseconds.

    If they share no good backward, the real-time clocks of both hosts are taken to agree.

    Example:
        On this host the last rank reached the end of a backward at 100, and the first rank went on at 160. On
        the other host these times are 1150 and 1170. So the other clock is ahead by at least 990 (1150 - 160)
        and at most 1070 (1170 - 100): the result is 1030.
    """
    came, left = _bounds(host)
    other_came, other_left = _bounds(other)
    shared = came.keys() & other_came.keys()
    if not shared:
        return _by_real_time(other) - _by_real_time(host)
    least = max(other_came[key] - left[key] for key in shared)
    most = min(other_left[key] - came[key] for key in shared)
    return (least + most) // 2


def _bounds(ranks: Sequence[RankTimeline]) -> tuple[Mapping[BackwardKey, int], Mapping[BackwardKey, int]]:
    """When the host's last rank came to the end of each good backward, and when its first rank went on."""
    failed = set().union(*(each.failed for each in ranks))
    keys = set.intersection(*(each.arrivals.keys() & each.ends.keys() for each in ranks)) - failed
    came = {key: max(each.arrivals[key] for each in ranks) for key in keys}
    left = {key: min(each.ends[key] for each in ranks) for key in keys}
    return came, left


def _by_real_time(ranks: Sequence[RankTimeline]) -> int:
    header = ranks[0].recording.header
    return header.monotonic_ns - header.real_ns
