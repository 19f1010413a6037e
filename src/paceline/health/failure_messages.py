"""A failure as the text that other ranks are told, and back.

The ranks of a host tell each other through an abort word in their memory, those of several hosts over the
control channel; both carry the same text, so that an error is the same wherever it came from.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import CollectiveError, DeadlineError, MismatchError, PeerLostError

TOLD_BYTES = 1016
"""Most of such a text. It fits into what the ranks of a host tell each other."""
_PREFIX = "between hosts: "
_KINDS = {kind.__name__: kind for kind in (CollectiveError, PeerLostError, DeadlineError, MismatchError)}
_FIELDS = ("lost", "late")
_TOLD_RANKS = 32


def pack_failure(error: BaseException, rank: int) -> str:
    """What all other ranks are told of a failure; see `unpack_failure`.

    Args:
        error: That the rank has met, or of its own.
        rank: The number of this process.

    Returns:
        ASCII, of at most TOLD_BYTES; long texts are cut.
    """
    kind, fields = type(error).__name__, {}
    if kind in _KINDS and isinstance(error, CollectiveError):
        rows = {row: getattr(error, row) for row in ("summary", "where", "seen", "likely")}
        ranks = {name: error.fields[name] for name in _FIELDS if name in error.fields}
        fields = {name: list(each)[:_TOLD_RANKS] for name, each in ranks.items()}
    else:
        kind, fields = "PeerLostError", {"lost": [rank]}
        rows = {"summary": f"Rank {rank} raised an exception.", "seen": f"{type(error).__name__}: {error}"}
    while True:
        packed = _PREFIX + json.dumps({"kind": kind, **rows, "fields": fields})
        if len(packed) <= TOLD_BYTES:
            return packed
        longest = max(rows, key=lambda row: len(rows[row]))
        rows[longest] = f"{rows[longest][: len(rows[longest]) * 3 // 4]} ..."


def is_packed(error: CollectiveError) -> bool:
    """Whether its words are those of `pack_failure`, which nobody should have to read."""
    return error.seen.startswith(_PREFIX)


def unpack_failure(told: CollectiveError, by: str = "") -> CollectiveError:
    """The failure that another rank has met, of this host or, where `by` tells, of another; else as it is."""
    if not is_packed(told):
        return told
    try:
        facts = json.loads(told.seen[len(_PREFIX) :])
        kind, told_fields = _KINDS[facts["kind"]], facts["fields"].items()
        summary = facts["summary"]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return told  # somebody else's words: shown as they are
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in told_fields
        if name in _FIELDS
    }
    return kind(
        summary,
        where=facts.get("where", ""),
        seen="\n".join(filter(None, [facts.get("seen", ""), by])),
        likely=facts.get("likely", ""),
        hint="that rank's traceback says more; this rank only reports it",
        **fields,
    )
