"""Searches every state that a setting can reach."""

from __future__ import annotations

from collections import deque

from .state import OVER, Setting, State, first_state
from .steps import STEPS, Violation, from_outside

MOST_STATES = 20_000_000


class Found(Exception):
    """A violation, and the shortest path to it."""


def successors(setting: Setting, state: State) -> list[State]:
    found: list[State] = []
    for r, rank in enumerate(state.ranks):
        if rank.at not in OVER and not rank.asleep:
            found.extend(STEPS[rank.at](setting, state, r))
    if setting.deaths or setting.deadlines:
        found.extend(from_outside(setting, state))
    return found


def check_end(setting: Setting, state: State) -> None:
    """Check a state with no successor: all ranks are over, and the survivors agree."""
    if any(rank.at not in OVER for rank in state.ranks):
        raise Violation("deadlock")
    good = {rank.good for rank in state.ranks if rank.at != "dead"}
    if len(good) > 1:
        raise Violation(f"survivors disagree how many backward passes were good: {sorted(good)}")


def search(setting: Setting) -> int:
    """Return the number of states. Raises Found at the first state that must not be reached."""
    start = first_state(setting)
    parents: dict[State, State | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        try:
            following = successors(setting, state)
            if not following:
                check_end(setting, state)
        except Violation as violation:
            raise Found(f"{violation}\n{way_to(state, parents)}") from violation
        for next_state in following:
            if next_state not in parents:
                parents[next_state] = state
                queue.append(next_state)
        if len(parents) > MOST_STATES:
            raise MemoryError(f"more than {MOST_STATES} states: {setting}")
    return len(parents)


def way_to(state: State | None, parents: dict[State, State | None]) -> str:
    lines: list[str] = []
    while state is not None:
        shared = state.shared
        ranks = ", ".join(f"{rank.at}{' (asleep)' if rank.asleep else ''}" for rank in state.ranks)
        lines.append(
            f"  arrived {shared.arrived}, done {shared.chunks_done}, ended {shared.ended},"
            f" bell {shared.bell}, sleepers {shared.sleepers}, abort {shared.abort}: {ranks}"
        )
        state = parents[state]
    return "\n".join(reversed(lines))
