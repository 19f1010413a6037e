"""Messages under way whose Work has no reference any more: their memory stays until they are over."""

from __future__ import annotations

from collections.abc import Callable

from paceline.collectives.work import TransferWork


class Core:
    """The transfers under way, and the result of the next query of one."""

    def __init__(self) -> None:
        self.under_way = {1, 2, 3, 4, 5}
        self.meanwhile: Callable[[], None] | None = None

    def forget(self, transfer: int) -> bool:
        """True if it is over."""
        if transfer not in self.under_way:
            return True
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return False


class Memory:
    """An array whose deletion can be observed."""

    def __init__(self, number: int, freed: set[int]) -> None:
        self.number, self.freed = number, freed

    def __del__(self) -> None:
        self.freed.add(self.number)


def test_another_thread_may_drop_its_own_in_the_midst_of_it() -> None:
    core, freed = Core(), set[int]()
    orphans: list[TransferWork] = []

    def start(number: int) -> list[TransferWork]:
        return [TransferWork(core, number, Memory(number, freed), orphans)]  # type: ignore[arg-type]

    for number in (1, 2, 3):
        start(number).clear()
    last, others = start(4), start(5)

    def by_another_thread() -> None:
        core.under_way.discard(1)
        others.clear()

    core.meanwhile = by_another_thread
    last.clear()
    assert freed == {1}
    core.under_way.clear()
    start(6).clear()  # is over: dropped at once
    assert freed == {1, 6}
    core.under_way.add(7)
    start(7).clear()
    assert freed == {1, 2, 3, 4, 5, 6}
