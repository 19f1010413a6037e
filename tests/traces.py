"""Reads trace files for tests, without our own code; and makes a rank slow on purpose."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

from paceline.trace.records import Event, backward_of
from paceline.trace.ring_file import path_of, read


def read_trace(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of a file by the name of their thread, which is a rank. Checks that slices nest."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in events
        if each["ph"] == "M" and each["name"] == "thread_name"
    }
    threads: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for each in events:
        if each["ph"] != "M":
            threads[names[each["pid"], each["tid"]]].append(each)
    for thread in threads.values():
        check_nesting(slices_of(thread))
    return threads


def slices_of(thread: list[dict[str, Any]], name: str = "") -> list[dict[str, Any]]:
    return [each for each in thread if each["ph"] == "X" and each["name"].startswith(name)]


def check_nesting(slices: list[dict[str, Any]]) -> None:
    for a, b in itertools.combinations(slices, 2):
        # Whole nanoseconds: sums of floats would differ in the last digit.
        (a0, a1), (b0, b1) = (
            (round(each["ts"] * 1000), round((each["ts"] + each["dur"]) * 1000)) for each in (a, b)
        )
        is_apart = a1 <= b0 or b1 <= a0
        is_within = (a0 <= b0 and b1 <= a1) or (b0 <= a0 and a1 <= b1)
        assert is_apart or is_within, (a, b)


def backwards_of(thread: list[dict[str, Any]], name: str) -> list[int]:
    return [each["args"]["iteration"] for each in slices_of(thread, name)]


def waited_for(threads: dict[str, list[dict[str, Any]]]) -> set[tuple[str, int, str]]:
    """(waiting rank, iteration, awaited rank) of each arrow."""
    begins = {each["id"]: rank for rank, thread in threads.items() for each in thread if each["ph"] == "s"}
    found = set()
    for rank, thread in threads.items():
        for arrow in thread:
            if arrow["ph"] != "f":
                continue
            (within,) = [
                each
                for each in slices_of(thread, "average")
                if each["ts"] <= arrow["ts"] <= each["ts"] + each["dur"]
            ]
            found.add((rank, within["args"]["iteration"], begins[arrow["id"]]))
    return found


def until_ended(folder: Path, rank: int, number: int) -> None:
    """Wait until a rank that records in this folder has ended the backward with this number."""
    while True:
        found = read(path_of(folder, rank).read_bytes())
        records = [] if found is None else found.records
        if any(
            each.event == Event.BACKWARD_ENDED and backward_of(each.first)[1] == number for each in records
        ):
            return
        time.sleep(0.02)
