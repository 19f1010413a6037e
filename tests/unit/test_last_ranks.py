"""When ranks that continue after the others are reported, and when they count as hung."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.launch.last_ranks import LastRanks


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.used = 0.0
        self.watch = LastRanks(400.0, lambda: self.now, self.used_by)

    def used_by(self, pids: Sequence[int]) -> float:
        assert pids == [7]
        return self.used

    def run(self, busy_until: float = 0.0, *, is_most: bool = False) -> list[float | None]:
        """Look when due, until the ranks have hung or an hour is over; return when they were reported."""
        self.watch.begin([7], is_most=is_most)
        reports: list[float | None] = []
        while self.now < 3700:
            seconds = self.watch.seconds_to_look()
            assert seconds is not None and seconds > 0
            begin, self.now = self.now, self.now + seconds
            self.used += max(0.0, min(self.now, busy_until) - begin)
            after_s, has_hung = self.watch.look([7])
            if after_s is not None:
                assert self.now - 100 == after_s
                reports.append(after_s)
            if has_hung:
                return [*reports, None]
        return reports


def test_nothing_is_due_while_the_job_runs() -> None:
    clock = Clock()
    assert clock.watch.seconds_to_look() is None
    assert clock.watch.look([7]) == (None, False)


def test_a_rank_that_ends_when_it_would_be_given_up_has_ended_well() -> None:
    """On a busy machine the launcher learns both at once."""
    clock = Clock()
    clock.watch.begin([7])
    clock.now += 1000
    assert clock.watch.look([]) == (None, False)


def test_an_idle_rank_is_reported_and_given_up() -> None:
    clock = Clock()
    assert clock.run() == [30, 60, 120, 300, None]
    assert clock.now == 500


def test_a_busy_rank_is_reported_only() -> None:
    assert Clock().run(busy_until=5000) == [30, 60, 120, 300, *range(600, 3601, 300)]


def test_a_rank_may_hang_after_it_has_worked() -> None:
    clock = Clock()
    assert clock.run(busy_until=550) == [30, 60, 120, 300, 600, 900, None]
    assert 950 <= clock.now <= 1400


def test_most_of_a_job_is_reported_if_it_is_idle() -> None:
    assert Clock().run(is_most=True) == [30, 60, 120, 300, None]
    assert Clock().run(busy_until=5000, is_most=True) == []
    clock = Clock()
    assert clock.run(busy_until=550, is_most=True) == [None]


def test_time_in_which_its_output_was_not_read_is_no_idle_time() -> None:
    """Also the time between the last look at the blocked rank and the moment when its output was read."""
    clock = Clock()
    clock.watch.begin([7], is_most=True)
    for is_unread, has_hung in ((True, False), (False, False), (False, True)):
        clock.now += 400
        assert clock.watch.look([7], is_unread=is_unread)[1] == has_hung


def test_another_end_begins_anew() -> None:
    clock = Clock()
    clock.watch.begin([7])
    clock.now += 29
    clock.watch.begin([7])
    assert clock.watch.seconds_to_look() == 30
