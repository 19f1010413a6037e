"""What a rank that is lost at a step of the optimizer means, in words. Imports errors."""

from __future__ import annotations

from paceline.errors import CollectiveError


class telling:
    """A context that adds to errors of a group in which step they came, and what that means.

    Args:
        owner: The class whose step() it is.
        consequence: For the parameters.
    """

    # Not a generator: those take longer to enter than the ranks to meet.
    def __init__(self, owner: str, consequence: str) -> None:
        self._owner, self._consequence = owner, consequence

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, CollectiveError) and not error.summary.startswith(self._owner):
            where = ", ".join(filter(None, [f"{self._owner}.step; {self._consequence}", error.where]))
            rows = {"seen": error.seen, "likely": error.likely, "hint": error.hint}
            raise type(error)(error.summary, where=where, **rows, **error.fields) from error


def refuse_after(failure: BaseException | None, owner: str) -> None:
    """Raise if a step was begun and not completed.

    Args:
        failure: Why it was not; None: none was.
        owner: The class, for errors.

    Raises:
        CollectiveError: Quotes it.
    """
    if failure is not None:
        raise CollectiveError(
            f"{owner}: an earlier step was not completed.",
            seen=str(failure),
            likely="a rank was lost in the middle of a step: some parameters are updated and others not",
            hint="load the parameters and the optimizer's state from a checkpoint, on every rank",
        ) from failure
