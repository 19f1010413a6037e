"""`paceline tune` without a process: layouts, rates, turns, the fastest layout, the stored result."""

from __future__ import annotations

import json
import random
import sys
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.launch import tune_answers
from paceline.launch.tune_answers import Layout, Place, Tuned
from paceline.trace.batch_size import shape_of_batch
from paceline.trace.records import Event, Record
from paceline.trace.ring_file import RankHeader, RankRecording
from paceline.tune import answer_text, compare
from paceline.tune.compare import Standing, judge
from paceline.tune.layouts import MOST_LAYOUTS, in_order_of_start, layouts_of
from paceline.tune.rates import Turn, counts_elements, steps_so_far, turn_of

ONE, TWO, FOUR = Layout(1, 4), Layout(2, 2), Layout(4, 1)


# --- layouts ---


@pytest.mark.parametrize(
    ("num_cores", "ranks"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 3]),
        (4, [1, 2, 4]),
        (6, [1, 2, 3, 6]),
        (7, [1, 2, 3, 7]),
        (8, [1, 2, 4, 8]),
        (64, [1, 2, 4, 8, 16, 32, 64]),
    ],
)
def test_the_layouts_of_a_machine(num_cores: int, ranks: list[int]) -> None:
    found = layouts_of(num_cores, 128)
    assert [layout.ranks for layout in found] == ranks
    assert [layout.threads for layout in found] == [num_cores // n for n in ranks]


@given(st.integers(1, 300))
def test_no_layout_has_more_threads_than_cores_and_the_ends_are_there(num_cores: int) -> None:
    found = layouts_of(num_cores, 128)
    assert len(set(found)) == len(found) <= MOST_LAYOUTS
    assert found[0] == Layout(1, num_cores)
    assert found[-1].ranks == min(num_cores, 128)
    assert all(layout.ranks * layout.threads <= num_cores for layout in found)
    started = in_order_of_start(found)
    assert sorted(started) == found
    assert started[: len(found)][:2] == [found[0], found[-1]][: len(found)]


# --- rates ---


def recording(rank: int, batches: list[tuple[float, int, int]], world_size: int = 1) -> RankRecording:
    header = RankHeader(rank, world_size, 1, "host", "boot", 0, 0, 1024)
    records = [Record(round(s * 1e9), Event.BATCH, 0, first, elements) for s, first, elements in batches]
    return RankRecording(header, [*records, Record(0, Event.FORWARD_BEGAN, 0, 0, 0)], [], 0)


def test_the_rate_of_a_turn_is_the_sum_over_ranks_of_whole_steps() -> None:
    # Every 0.5 s 8 samples on rank 0 and 4 on rank 1, of 3 elements each; the first step counts for nothing.
    ranks = [recording(r, [(0.5 * at, n, 3 * n) for at in range(6)], 2) for r, n in ((0, 8), (1, 4))]
    turn = turn_of(ranks, 2)
    assert turn == Turn(24.0, 72.0, 12.0, 36.0, 4)
    assert steps_so_far(ranks, 2) == 6


def test_what_lies_outside_of_a_turn_does_not_count() -> None:
    slow_then_fast = [(float(at), 1, 1) for at in range(10)] + [(10 + 0.1 * at, 1, 1) for at in range(20)]
    turn = turn_of([recording(0, slow_then_fast)], 1, begin_ns=10 * 10**9)
    assert turn is not None
    assert turn.samples_per_s == pytest.approx(10)
    assert turn_of([recording(0, slow_then_fast)], 1, begin_ns=0, end_ns=2 * 10**9) is not None


def test_a_turn_of_too_few_steps_or_of_a_missing_rank_gives_no_rate() -> None:
    assert turn_of([recording(0, [(0.0, 4, 4), (1.0, 4, 4)])], 1) is None
    whole = recording(0, [(float(at), 4, 4) for at in range(9)], 2)
    assert turn_of([whole], 2) is None
    assert turn_of([whole, recording(1, [], 2)], 2) is None
    assert steps_so_far([whole], 2) == 0


def test_elements_are_counted_where_the_first_dimension_shows_nothing() -> None:
    # (time 35, batch 64) on one rank; (35, 32) on each of two.
    one, two = Turn(350, 22400, 35, 35 * 64, 9), Turn(1400, 44800, 70, 2 * 35 * 32, 9)
    assert counts_elements([(1, one), (2, two)])
    verdict = judge([Standing(ONE, [one] * 7), Standing(TWO, [two] * 7)])
    assert verdict is not None and verdict.unit == "elements"
    result = verdict.result(TWO)
    assert result is not None and result.of_one is not None
    assert result.of_one.median == 2.0  # and not 4
    # A fixed batch per rank, and a divided one, whose first dimension shows it.
    assert not counts_elements([(1, Turn(1, 1, 32, 320, 9)), (2, Turn(1, 1, 64, 640, 9))])
    assert not counts_elements([(1, Turn(1, 1, 32, 320, 9)), (2, Turn(1, 1, 32, 320, 9))])


class Shaped:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


@pytest.mark.parametrize(
    ("args", "kwargs", "shape"),
    [
        ((Shaped(32, 3),), {}, (32, 3)),
        ((), {"input_ids": Shaped(8, 128), "labels": Shaped(8)}, (8, 128)),
        ((1.5, "text", [Shaped(), {"x": Shaped(4)}]), {}, (4,)),  # a tensor without dimensions is no batch
        ((UserDict(input_ids=Shaped(2, 5)),), {}, (2, 5)),  # as Transformers' BatchEncoding
        ((SimpleNamespace(shape="round"), Shaped(7)), {}, (7,)),
        ((object(),), {}, (1,)),
    ],
)
def test_the_shape_of_a_batch(args: tuple[object, ...], kwargs: dict[str, object], shape: object) -> None:
    assert shape_of_batch(args, kwargs) == shape


# --- the fastest ---


def turns(*rates: float, per_step: float = 64) -> list[Turn | None]:
    return [Turn(rate, 10 * rate, per_step, 10 * per_step, 20) for rate in rates]


def standing(layout: Layout, *rates: float, per_step: float = 64, **more: object) -> Standing:
    return Standing(layout, turns(*rates, per_step=per_step), **{"is_running": True, **more})  # type: ignore[arg-type]


def text_of(standings: list[Standing]) -> str:
    verdict = judge(standings)
    assert verdict is not None
    return " ".join(answer_text.sentences(verdict, standings, 4))


def test_a_layout_that_is_faster_in_every_round_is_faster() -> None:
    # The machine is slower by and by, and the layouts differ by less than that.
    standings = [standing(ONE, *range(100, 93, -1)), standing(TWO, *(1.05 * r for r in range(100, 93, -1)))]
    verdict = judge(standings)
    assert verdict is not None
    assert verdict.recommended == verdict.fastest == TWO
    assert [each.is_slower for each in verdict.results] == [True, False]
    assert "2 ranks x 2 threads is fastest: 1.05x of one rank." in text_of(standings)


def test_one_process_is_recommended_where_it_is_fastest_and_where_no_difference_shows() -> None:
    slower = [standing(ONE, *[100] * 7), standing(TWO, *[80, 81, 82, 83, 84, 85, 86])]
    assert (
        "One process is fastest: 2 ranks x 2 threads, the next best, reaches 0.83x (0.80 to 0.86)"
        in text_of(slower)
    )
    tie = [standing(ONE, *[100, 98] * 4), standing(TWO, *[99, 101] * 4)]
    verdict = judge(tie)
    assert verdict is not None
    assert (verdict.fastest, verdict.recommended) == (TWO, ONE)
    assert "no difference that can be told" in text_of(tie)


def test_a_wide_interval_claims_no_fastest_layout() -> None:
    wide = [standing(ONE, *[100] * 7), standing(TWO, 30, 32, 60, 69, 90, 190, 230)]
    verdict = judge(wide)
    assert verdict is not None and (verdict.fastest, verdict.recommended) == (ONE, ONE)
    said = text_of(wide)
    assert (
        "One process with 4 threads is as good as any: 2 ranks x 2 threads reaches 0.69x (0.30 to 2.30)"
        in said
    )
    assert said.count("no difference that can be told") == 1 and "More ranks gain nothing" in said
    assert "is fastest" not in said and "slower" not in said and "from the fastest" not in said


def test_the_doubt_names_the_layouts_that_the_recommendation_does_not() -> None:
    three = [
        standing(ONE, *[100] * 7),
        standing(TWO, 30, 32, 60, 69, 90, 190, 230),
        standing(FOUR, 30, 32, 50, 60, 90, 190, 230),
    ]
    said = text_of(three)
    assert "2 ranks x 2 threads reaches 0.69x" in said
    assert "No difference that can be told from the fastest: 4 ranks x 1 thread (0.60x" in said
    # A certainly slower layout with the higher median is not the one that leaves the answer open.
    three[1] = standing(TWO, *[95] * 7)
    assert "One process with 4 threads is as good as any: 4 ranks x 1 thread reaches 0.60x" in text_of(three)


def test_several_ranks_that_one_may_equal_are_fastest_by_the_median_only() -> None:
    wide = [standing(ONE, 30, 32, 60, 69, 90, 190, 230), standing(TWO, *[100] * 7)]
    said = text_of(wide)
    assert "2 ranks x 2 threads is fastest: 1.45x (0.43 to 3.33) of one rank, by the median." in said
    assert "No difference that can be told from the fastest: 1 rank x 4 threads" in said


def test_a_tie_is_no_excuse_for_a_layout_that_is_slower_by_the_median() -> None:
    noisy = [standing(ONE, *[100] * 8), standing(TWO, *[140, 90, 141, 142, 95, 143, 144, 99])]
    verdict = judge(noisy)
    assert verdict is not None
    assert verdict.recommended == TWO  # half of its rounds are 1.4 times as fast
    assert "No difference that can be told from the fastest" not in text_of(noisy)[:40]


def test_few_rounds_claim_nothing() -> None:
    standings = [standing(ONE, 100, 100), standing(TWO, 150, 150)]
    verdict = judge(standings)
    assert verdict is not None
    assert not any(each.is_slower for each in verdict.results)
    said = text_of(standings)
    assert said.startswith("Not sure: too few measurements of 1 rank x 4 threads (2 rounds), 2 ranks x 2 ")
    assert [each.layout for each in verdict.unsure] == [ONE, TWO]
    assert not compare.is_decided(standings)


def test_a_script_with_a_fixed_batch_per_rank_is_reported_what_that_means() -> None:
    standings = [standing(ONE, *[100] * 7, per_step=32), standing(TWO, *[150] * 7, per_step=64)]
    assert "32 with 1 rank, 64 with 2 ranks" in text_of(standings)
    same = [standing(ONE, *[100] * 7), standing(TWO, *[150] * 7)]
    assert "learning rate" not in text_of(same)


def test_a_busy_machine_is_reported_because_it_is_unfair_to_threads() -> None:
    standings = [standing(ONE, *[100] * 7), standing(TWO, *[150] * 7)]
    verdict = judge(standings)
    assert verdict is not None
    busy, idle = (" ".join(answer_text.sentences(verdict, standings, 4, load)) for load in (3.0, 1.9))
    assert "The machine was busy before the measurement (load 3.0 on 4 cores)" in busy
    assert "busy" not in idle


def test_what_ended_before_its_first_turn_counts_once() -> None:
    (whole,) = turns(90)
    standings = [
        Standing(ONE, [], out="the script ended after 12 steps", whole=whole),
        standing(TWO, *[80] * 7),
    ]
    verdict = judge(standings)
    assert verdict is not None
    assert [each.rounds for each in verdict.results] == [1, 7]
    assert "1 rank x 4 threads: the script ended after 12 steps." in text_of(standings)
    assert judge([Standing(ONE), Standing(TWO, [None])]) is None


def test_the_table_has_a_row_for_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    standings = [
        standing(ONE, *[100] * 7),
        standing(TWO, *[150] * 7),
        Standing(FOUR, out="failed: ValueError"),
    ]
    verdict = judge(standings)
    assert verdict is not None
    table = answer_text.rows(verdict, standings)
    assert [row[:4] for row in table] == [
        ["1", "4", "100", "1.00x"],
        ["2", "2", "150", "1.50x"],
        ["4", "1", "", ""],
    ]
    assert len(table[0][-1]) * 3 == len(table[1][-1]) * 2
    answer_text.show("title", "samples", table, answer_text.sentences(verdict, standings, 4))
    shown = capsys.readouterr().out
    assert "samples/s" in shown and "1.50x" in shown and "4 ranks x 1 thread: failed: ValueError." in shown


@pytest.mark.parametrize("has_rich", [True, False])
@pytest.mark.parametrize("width", [60, 80, 90, 100, 120])
def test_the_table_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, has_rich: bool
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    standings = [standing(ONE, *[20_000] * 7), standing(TWO, *range(30_000, 37_000, 1_000))]
    verdict = judge(standings)
    assert verdict is not None
    answer_text.show("title", "samples", answer_text.rows(verdict, standings), [])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    shown = "\n".join(lines)
    assert "33,000" in shown and "1.65x (1.50 to 1.80)" in shown and "…" not in shown
    assert ("per step" in shown, "from - to" in shown) in {60: [(False, False)], 120: [(True, True)]}.get(
        width, [(False, False), (False, True), (True, True)]
    )
    one, two = (line.count("█") for line in lines if "1.00x" in line or "1.65x" in line)
    assert 0 < one < two or (width == 60 and one == two == 0)


def test_forty_columns_are_enough_for_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    standings = [standing(ONE, *[20_000] * 7), standing(TWO, *range(30_000, 37_000, 1_000))]
    verdict = judge(standings)
    assert verdict is not None
    answer_text.show("title", "samples", answer_text.rows(verdict, standings), [])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert "1.65x" in "".join(lines) and "33,000" in "".join(lines)


# --- the next turn, and when to stop ---


def test_the_answer_is_drawn_with_a_bar_for_each_layout(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    verdict = judge([standing(ONE, *[100.0] * 7), standing(TWO, *[150.0] * 7)])
    assert verdict is not None
    answer_text.draw(verdict, "train.py on 4 cores", "a processor", tmp_path / "answer.png")
    assert (tmp_path / "answer.png").stat().st_size > 10_000


def test_every_other_round_goes_the_other_way() -> None:
    standings = [Standing(layout, is_running=True) for layout in (ONE, FOUR, TWO)]
    order = []
    for _ in range(6):
        due = compare.next_turn(standings)
        assert due is not None
        due.turns.append(None)
        order.append(due.layout)
    assert order == [ONE, FOUR, TWO, TWO, FOUR, ONE]
    standings[0].is_running = False
    due = compare.next_turn(standings)
    assert due is not None and due.layout == FOUR


def test_turns_are_as_long_as_steps_and_time_ask_for() -> None:
    fast, slow = Standing(ONE, step_s=0.001), Standing(ONE, step_s=1.0)
    assert compare.turn_seconds(fast, 2, 60.0) == pytest.approx(2.0)
    assert compare.turn_seconds(fast, 4, 12.0) == pytest.approx(0.4)
    assert compare.turn_seconds(slow, 2, 600.0) == pytest.approx(10.0)
    assert compare.turn_seconds(slow, 2, 50.0) == pytest.approx(4.0)  # ten steps would be one round
    assert compare.turn_seconds(slow, 2, 3.0) is None


def test_no_layout_is_started_that_leaves_no_time_to_measure() -> None:
    running = [Standing(ONE, is_running=True, step_s=0.01)]
    both = [*running, Standing(FOUR, is_running=True, step_s=0.1)]
    assert compare.has_time_for_another([], 0.0, 1.0)
    assert compare.has_time_for_another(running, 10.0, 1.0)  # one alone is no answer
    assert compare.has_time_for_another(both, 10.0, 20.0)
    assert not compare.has_time_for_another(both, 10.0, 16.0)
    assert compare.start_seconds(running, 20.0, is_last=False) == 10.0
    assert compare.start_seconds(running, 20.0, is_last=True) == pytest.approx(17.6)


def test_a_layout_that_is_far_behind_is_out_and_a_sure_contest_is_over() -> None:
    standings = [standing(ONE, *[100] * 7), standing(TWO, *[140] * 7), standing(FOUR, *[125] * 7)]
    assert [compare.is_out(each, standings) for each in standings] == [True, False, False]
    assert compare.is_decided(standings)
    unsure = [standing(TWO, *[140] * 7), standing(FOUR, *[130, 150] * 3, 140)]
    assert not compare.is_decided(unsure)
    same = [standing(TWO, *[140] * 7), standing(FOUR, *[139, 141] * 3, 140)]
    assert compare.is_decided(same)
    assert compare.is_decided([replace(each, is_running=False) for each in unsure])


@pytest.mark.parametrize("seed", range(20))
def test_the_recommended_layout_is_within_5_percent_of_the_best_one(seed: int) -> None:
    """A machine whose speed drifts, turns that vary by 3 %, and layouts of unknown speed."""
    dice = random.Random(seed)
    speeds = {layout: 100 * dice.uniform(0.6, 1.6) for layout in (ONE, TWO, FOUR)}
    standings = [Standing(layout, is_running=True, step_s=0.01) for layout in (ONE, FOUR, TWO)]
    machine, left_s = 1.0, 60.0
    while not compare.is_decided(standings):
        due = compare.next_turn(standings)
        assert due is not None
        running = sum(each.is_running for each in standings)
        seconds = compare.turn_seconds(due, running, left_s)
        if seconds is None:
            break
        left_s -= seconds
        machine = min(1.0, max(0.4, machine * dice.uniform(0.95, 1.05)))
        due.turns += turns(speeds[due.layout] * machine * dice.gauss(1, 0.03))
        due.is_running = not compare.is_out(due, standings)
    verdict = judge(standings)
    assert verdict is not None
    assert speeds[verdict.recommended] >= 0.95 * max(speeds.values())


# --- the stored result ---

HERE = Place("a processor", 4)


def an_answer(layout: Layout = TWO, place: Place = HERE, gain: float | None = 1.5) -> Tuned:
    return Tuned(layout, place, "/home/me/train.py", ("--lr", "1"), 1_700_000_000.0, gain, "it was busy")


def test_an_answer_is_found_again(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    path = tune_answers.keep(an_answer(ONE), environment)
    tune_answers.keep(an_answer(TWO), environment)
    tune_answers.keep(an_answer(FOUR, Place("another", 8), None), environment)
    assert tune_answers.find("/home/me/train.py", HERE, environment, "") == an_answer(TWO)
    assert tune_answers.find("/home/me/train.py", Place("another", 8), environment, "").gain is None
    assert path.parent.parent == tmp_path / "cache" / "paceline"
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]  # no temporary file is left


def test_an_answer_of_another_machine_is_refused_with_words(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match="there is none for this script") as none:
        tune_answers.find("/home/me/train.py", HERE, environment, "paceline tune train.py")
    assert "`paceline tune train.py`" in str(none.value)
    path = tune_answers.keep(an_answer(), environment)
    with pytest.raises(ConfigError, match="was measured on another machine") as other:
        tune_answers.find("/home/me/train.py", Place("a processor", 2), environment, "paceline tune train.py")
    assert "a processor, 2 cores" in str(other.value) and "a processor, 4 cores (2 ranks x 2" in str(
        other.value
    )
    for spoilt in (
        "",
        "{",
        "[{}]",
        json.dumps([{**json.loads(path.read_text())[0], "layout": {"ranks": 0}}]),
    ):
        path.write_text(spoilt)
        with pytest.raises(ConfigError, match="there is none for this script"):
            tune_answers.find("/home/me/train.py", HERE, environment, "")


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tune_answers.cache_folder({"XDG_CACHE_HOME": "here"}) == tmp_path / ".cache" / "paceline"


def test_arguments_are_divided_by_the_ranks() -> None:
    command = ["train.py", "--batch", "{256/ranks}", "--name={ranks}x{8/ranks}", "{other}"]
    assert tune_answers.fill_in(command, 2) == ["train.py", "--batch", "128", "--name=2x4", "{other}"]
    assert tune_answers.fill_in(command, 3) is None
