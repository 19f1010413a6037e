"""What a rank that is lost at a step of the optimizer means, in words."""

from __future__ import annotations

from paceline.errors import CollectiveError, DeadlineError, GroupClosedError, PeerLostError, RendezvousError

NOTHING_WRITTEN = "nothing was written yet"
COMPLETE = "the step is complete: every rank's part is written"
HALF = "some parameters may be updated and others not"


def is_loss(error: BaseException | None) -> bool:
    """Whether an error says that ranks did not come to a barrier, and not that they came for other things."""
    return isinstance(error, (PeerLostError, DeadlineError, GroupClosedError, RendezvousError))


class telling:
    """A context that adds to errors of a group in which step they came, and what that means.

    Args:
        owner: The class whose step() it is.
        consequence: For the parameters.
        fields: Facts for programs, which become attributes of the error.
    """

    # Not a generator: those take longer to enter than the ranks to meet.
    def __init__(self, owner: str, consequence: str, **fields: object) -> None:
        self._owner, self._consequence, self._fields = owner, consequence, fields

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, CollectiveError) and not error.summary.startswith(self._owner):
            raise self.told(error) from error

    def told(self, error: CollectiveError) -> CollectiveError:
        """The same error, with these words."""
        where = ", ".join(filter(None, [f"{self._owner}.step; {self._consequence}", error.where]))
        rows = {row: getattr(error, row) for row in ("seen", "expected", "got", "likely", "hint")}
        fields = {**error.fields, **self._fields}
        return type(error)(error.summary, where=where, **rows, **fields)
