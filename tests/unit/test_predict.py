"""The model of the cost beside what was measured, and docs/scaling.md beside both."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from paceline.bench.predict import Machines, efficiency, predict, predict_torch, run
from paceline.reducer.between_hosts.sum_formats import ENCODINGS
from tests.harness.command import ROOT

PAGE = (ROOT / "docs" / "scaling.md").read_text()
MEASURED = ROOT / "benchmarks" / "results" / "hosts_epyc-2c_2026-11-22.md"
FASTEST = ROOT / "benchmarks" / "results" / "one-rank-per-host_epyc-2c_2026-11-23.md"
# Two cores, of which a copy of memory in one process takes a part.
HERE = Machines(100e6, memory_bytes_per_s=20e9)


def measured(path: Path):
    """(layout, size in MB, torch's seconds, ours) of each row of a table of `make hosts`."""
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.match(r"\d+x\d+", cells[0]):
            theirs = float(cells[4]) / 1e3
            yield cells[0], float(cells[2].split()[0]), theirs, theirs * float(cells[6].split()[0])


def compared():
    """Measured time as a multiple of the predicted one: {(layout, MB): [(torch's, ours), ...]}."""
    found = defaultdict(list)
    for layout, megabytes, theirs, ours in measured(MEASURED):
        hosts, ranks = map(int, re.match(r"(\d+)x(\d+)", layout).groups())
        nbytes = int(megabytes * 1e6) // 4 * 4
        ring = predict_torch(nbytes, hosts, ranks, HERE, in_turn="in turn" in layout)
        shares = predict(nbytes, hosts, ranks, HERE)
        found[layout, megabytes].append((theirs / ring.seconds, ours / shares.seconds))
    return found


def compared_at_10_gbits():
    """The same at 10 Gbit/s: {(layout, MB): (torch's, ours)}."""
    found = {}
    for line in FASTEST.read_text().partition("## At 10 Gbit/s")[2].splitlines():
        if match := re.match(r"\| ((\d)x(\d)) \| (\S+) MB \| (\S+) \| [^|]+ \| \**([\d.]+)", line):
            layout, hosts, ranks, megabytes, theirs, ratio = match.groups()
            sizes = int(float(megabytes) * 1e6) // 4 * 4, int(hosts), int(ranks)
            machines = Machines(9.05e9, memory_bytes_per_s=HERE.memory_bytes_per_s)  # what the link carried
            seconds = float(theirs) / 1e3
            found[layout, float(megabytes)] = (
                seconds / predict_torch(*sizes, machines).seconds,
                seconds * float(ratio) / predict(*sizes, machines).seconds,
            )
    return found


def tables(text):
    """The tables of a page, each as its lines."""
    return re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)


def test_measured_times_are_near_those_of_the_model():
    """Where the link decides; nothing is faster than the model, whose constants are all lower bounds."""
    for (layout, megabytes), ratios in compared().items():
        for ratio in (number for pair in ratios for number in pair):
            assert 0.97 < ratio < (1.25 if megabytes > 1 else 2.5), (layout, megabytes, ratios)


def test_at_10_gbits_the_page_says_how_far_off_the_model_is():
    """There two cores do the work of all hosts, and are slower than the link."""
    lines = ["| hosts x ranks | gradients | torch's DDP | Paceline |", "|---|---|--:|--:|"]
    for (layout, megabytes), ratios in compared_at_10_gbits().items():
        assert all(1.9 < ratio < 5.0 for ratio in ratios)
        lines.append(f"| {layout} | {megabytes:g} MB | {ratios[0]:.1f} | {ratios[1]:.1f} |")
    assert len(lines) == 6
    assert "\n".join(lines) + "\n" in tables(PAGE), "docs/scaling.md should have:\n" + "\n".join(lines)


def test_paddle_goes_over_its_group_alone_with_more_hosts_than_it_has_connections_for():
    hosts = (ROOT / "src/paceline/paddle/link/hosts.py").read_text()
    (most,) = re.findall(r"^MOST_HOSTS = (\d+)$", hosts, flags=re.MULTILINE)
    words = f"Paddle on more than {most} hosts"
    assert any(words in note for note in run(1 << 20, [2, int(most) + 1], 8, [1.0], "").notes)
    assert not any(words in note for note in run(1 << 20, [2, int(most)], 8, [1.0], "").notes)


def test_the_panels_of_the_picture_have_one_scale_with_more_than_one_mark(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    from paceline.bench import plot

    drawn = []
    monkeypatch.setattr(plot, "_save", lambda figure, *_, **__: drawn.append(figure))
    for nbytes, rates in ((100 << 20, [1.0, 10.0, 100.0]), (4 << 20, [1.0])):
        plot.draw_predict(run(nbytes, [2, 8], 8, rates, ""), tmp_path / "x.png")
        panels = drawn[-1].axes
        assert len({panel.get_ylim() for panel in panels}) == 1
        marks = [text.get_text() for text in panels[0].get_yticklabels()]
        assert len(marks) >= 2 and all(mark.endswith("s") for mark in marks), marks


def test_the_page_has_the_comparison():
    lines = ["| hosts x ranks | gradients | torch's DDP | Paceline |", "|---|---|--:|--:|"]
    for (layout, megabytes), ratios in compared().items():
        theirs, ours = (statistics.median(column) for column in zip(*ratios))
        lines.append(f"| {layout} | {megabytes:g} MB | {theirs:.2f} | {ours:.2f} |")
    assert "\n".join(lines) + "\n" in tables(PAGE), "docs/scaling.md should have:\n" + "\n".join(lines)


def test_the_page_has_the_prediction():
    report = run(100 << 20, (2, 8, 64, 1024), 8, (1.0, 10.0, 100.0), "")
    table = "".join(line + "\n" for line in report.as_markdown().splitlines() if line.startswith("|"))
    assert table in tables(PAGE), "docs/scaling.md should have:\n" + table


def test_bytes_are_those_that_a_host_has_to_send():
    """2 (H - 1) / H of the gradients; in one round between two hosts the same."""
    for hosts, floor in ((2, 1.0), (4, 1.5), (8, 1.75)):
        sent = predict(64 << 20, hosts, 4, Machines(1e10)).sent_bytes
        assert sent == pytest.approx(floor * (64 << 20), rel=0.01)
    assert predict(64 << 20, 4, 4, Machines(1e10), "int8").sent_bytes == pytest.approx(
        0.381 * (64 << 20), rel=0.01
    )
    in_blocks, in_turn = (
        predict_torch(64 << 20, 2, 2, Machines(1e9), in_turn=turns).sent_bytes for turns in (False, True)
    )
    assert (in_blocks, in_turn) == (1.5 * (64 << 20), 3 * (64 << 20))


@pytest.mark.parametrize(
    ("nbytes", "hosts", "machines", "limit"),
    [
        (100 << 20, 8, Machines(1e9), "link"),
        (100 << 20, 8, Machines(1e12), "connections"),
        (100 << 20, 1024, Machines(1e12), "messages"),
        (1 << 10, 2, Machines(1e12, message_s=1e-9), "latency"),
        (100 << 20, 2, Machines(1e12, connection_bits_per_s=1e12, memory_bytes_per_s=1e9), "memory"),
    ],
)
def test_what_decides_is_told(nbytes, hosts, machines, limit):
    assert predict(nbytes, hosts, 8, machines).limit == limit


def test_averaging_that_hides_costs_nothing():
    assert efficiency(0.3, 0.15) == 1.0
    assert efficiency(0.3, 0.5) == pytest.approx(0.5)
    report = run(4 << 20, (2,), 2, (1.0,), "", step_s=0.3)
    assert [row[-1] for row in report.rows] == ["100%"]


def test_every_compression_sends_less():
    """As the core counts their bytes."""
    plain, *coded = (
        predict(64 << 20, 4, 4, Machines(1e10), name).sent_bytes
        for name in ("", "bf16", "fp16", "int8", "topk")
    )
    assert {"bf16", "fp16", "int8", "topk"} == {*ENCODINGS}
    assert [each / plain for each in coded] == pytest.approx([1 / 2, 1 / 2, 0.254, 1 / 43], rel=0.02)
