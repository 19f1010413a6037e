"""`paceline predict`: its cost model, compared with measurements and docs/scaling.md; the command."""

from __future__ import annotations

import json
import re
import sys

import pytest

from paceline.cli import main
from paceline.predict import Machines, efficiency, predict_paceline, predict_times, predict_torch
from paceline.reducer.between_hosts.compressed_sums import ENCODINGS
from tests.harness.command import ROOT

PAGE = (ROOT / "docs" / "scaling.md").read_text()
MEASURED = ROOT / "benchmarks" / "results" / "one-direction_epyc-2c.md"
# Two cores; a copy of memory in one process takes a fraction of them.
MEMORY_BYTES_PER_S = 20e9
ROW = re.compile(
    r"^\| ((\d)x(\d)(?: in turn)?) \| ((\d+) ([GM])bit/s) \| ([\d.]+) MB \| ([\d.]+) \| ([\d.]+) \(", re.M
)


def compared():
    """Measured time as a multiple of the predicted one: {(layout, link, MB): (torch's, ours)}."""
    found = {}
    text = MEASURED.read_text().partition("\n## float32\n")[2].partition("\n## ")[0]
    for layout, hosts, ranks, link, rate, unit, megabytes, theirs, ratio in ROW.findall(text):
        machines = Machines(float(rate) * {"G": 1e9, "M": 1e6}[unit], memory_bytes_per_s=MEMORY_BYTES_PER_S)
        sizes = int(float(megabytes) * 1e6) // 4 * 4, int(hosts), int(ranks)
        ring = predict_torch(*sizes, machines, in_turn="in turn" in layout)
        seconds = float(theirs) / 1e3
        found[layout, link, float(megabytes)] = (
            seconds / ring.seconds,
            seconds * float(ratio) / predict_paceline(*sizes, machines).seconds,
        )
    return found


def where_the_link_decides():
    """Slow links first. The processor decides below 1 MB on faster links, and at 10 Gbit/s."""
    slow, fast = "100 Mbit/s", "1 Gbit/s"
    found = {
        key: each for key, each in compared().items() if key[1] == slow or (key[1] == fast and key[2] >= 1)
    }
    return dict(sorted(found.items(), key=lambda item: (item[0][1] == fast, item[0][2], item[0][0])))


def as_table(comparison):
    lines = ["| hosts x ranks | link | gradients | torch's DDP | Paceline |", "|---|---|--:|--:|--:|"]
    for (layout, link, megabytes), (theirs, ours) in comparison.items():
        lines.append(f"| {layout} | {link} | {megabytes:g} MB | {theirs:.2f} | {ours:.2f} |")
    return "\n".join(lines) + "\n"


def tables(text):
    """The tables of a page, each as its lines."""
    return re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)


def test_measured_times_are_near_those_of_the_model():
    """Nothing is faster than the model, whose constants are all lower bounds."""
    found = where_the_link_decides()
    assert len(found) == 21
    for key, ratios in found.items():
        assert all(1.0 <= ratio < (1.3 if key[2] > 0.02 else 1.7) for ratio in ratios), (key, ratios)


def test_paddle_goes_over_its_group_alone_with_more_hosts_than_it_has_connections_for():
    hosts = (ROOT / "src/paceline/paddle/communicator/hosts.py").read_text()
    (most,) = re.findall(r"^MOST_HOSTS = (\d+)$", hosts, flags=re.MULTILINE)
    words = f"Paddle on more than {most} hosts"
    assert any(words in note for note in predict_times(1 << 20, [2, int(most) + 1], 8, [1.0]).notes)
    assert not any(words in note for note in predict_times(1 << 20, [2, int(most)], 8, [1.0]).notes)


def test_the_page_has_the_comparison():
    """And how far off the model is if two cores do the work of all hosts, and are slower than the link."""
    beyond = {key: ratios for key, ratios in compared().items() if key[1] == "10 Gbit/s" and key[2] > 1}
    assert len(beyond) == 6
    for comparison in (where_the_link_decides(), beyond):
        table = as_table(comparison)
        assert table in tables(PAGE), "docs/scaling.md should have:\n" + table


def test_the_page_has_the_prediction():
    times = predict_times(100 << 20, (2, 8, 64, 1024), 8, (1.0, 10.0, 100.0, 400.0))
    rows = [times.columns, ["---", *["--:"] * (len(times.columns) - 1)], *times.rows]
    table = "".join(f"|{'|'.join(row)}|\n" if row[0] == "---" else f"| {' | '.join(row)} |\n" for row in rows)
    assert table in tables(PAGE), "docs/scaling.md should have:\n" + table


def test_bytes_are_those_that_a_host_has_to_send():
    """2 (H - 1) / H of the gradients; in one round between two hosts the same."""
    for hosts, floor in ((2, 1.0), (4, 1.5), (8, 1.75)):
        sent = predict_paceline(64 << 20, hosts, 4, Machines(1e10)).sent_bytes
        assert sent == pytest.approx(floor * (64 << 20), rel=0.01)
    assert predict_paceline(64 << 20, 4, 4, Machines(1e10), "int8").sent_bytes == pytest.approx(
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
def test_what_decides_is_reported(nbytes, hosts, machines, limit):
    assert predict_paceline(nbytes, hosts, 8, machines).limit == limit


def test_averaging_that_hides_costs_nothing():
    assert efficiency(0.3, 0.15) == 1.0
    assert efficiency(0.3, 0.5) == pytest.approx(0.5)
    times = predict_times(4 << 20, (2,), 2, (1.0,), step_s=0.3)
    assert [row[-1] for row in times.rows] == ["100%"]


def test_every_compression_sends_less():
    """The expected ratios are those of the core's byte counts."""
    plain, *coded = (
        predict_paceline(64 << 20, 4, 4, Machines(1e10), name).sent_bytes
        for name in ("", "bf16", "fp16", "int8", "topk")
    )
    assert {"bf16", "fp16", "int8", "topk"} == {*ENCODINGS}
    assert [each / plain for each in coded] == pytest.approx([1 / 2, 1 / 2, 0.254, 1 / 43], rel=0.02)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A file with a function that makes a model of 4 MiB."""
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "a_model_of_a_test.py"
    monkeypatch.setitem(sys.modules, file.stem, None)  # the command imports it, and the end removes it
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(1024, 1024)\n")
    return file


def test_the_command_predicts_the_memory_of_a_model(model, tmp_path, capsys):
    assert main(["predict", f"{model}:build", "-n", "64"]) == 0
    shown = capsys.readouterr().out
    assert "64 ranks on 1 host; one copy of the parameters takes 4.00 MiB" in shown
    assert re.search(r"one model, ShardedOptimizer, bucket view .* 0\.3\d", shown)
    assert "Time of averaging" not in shown
    command = ["predict", f"{model}:build", "-n", "2", "--json", str(tmp_path / "found.json")]
    assert main([*command, "--optimizer", "SGD", "--option", "momentum=0.9"]) == 0
    (memory,) = json.loads((tmp_path / "found.json").read_text())["memory"]
    assert memory["variants"]["torch_view"]["state"] == 2 * 4 * (1024 * 1024 + 1024)


def test_the_command_predicts_the_time_of_averaging_over_hosts(model, tmp_path, capsys):
    found = tmp_path / "found.json"
    assert main(["predict", f"{model}:build", "-n", "2", "--hosts", "1,2", "--json", str(found)]) == 0
    shown = capsys.readouterr().out
    assert "2 ranks on 1 host" in shown and "4 ranks on 2 hosts" in shown and "2 x 2" in shown
    values = json.loads(found.read_text())
    nbytes = 4 * (1024 * 1024 + 1024)
    assert (values["gradient_bytes"], len(values["memory"])) == (nbytes, 2)
    assert [each["seconds"]["paceline"] for each in values["times"]] == [
        predict_paceline(nbytes, 2, 2, Machines(rate)).seconds for rate in (1e9, 1e10, 1e11)
    ]
    assert main(["predict", "--gradients", "100MiB", "-n", "8", "--rates", "400", "--step-ms", "300"]) == 0
    assert "1024 x 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-n", "2"], "either a model or --gradients"),
        (["model.py", "--gradients", "1MiB", "-n", "2"], "either a model or --gradients"),
        (["--gradients", "1MiB", "-n", "2", "--hosts", "1"], "no network"),
        (["/no/such.py", "-n", "2"], "There is no file"),
        (["{model}", "-n", "2"], "functions without arguments: build"),
        (["{model}:build", "-n", "2", "--optimizer", "Eve"], "no optimizer Eve"),
        (["--gradients", "1MiB", "-n", "2", "--json", "/no/such/folder/x.json"], "can't be written"),
    ],
)
def test_what_cannot_be_predicted_is_reported(model, capsys, arguments, complaint):
    assert main(["predict", *(each.replace("{model}", str(model)) for each in arguments)]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gradients", "16K"], "'16K' is no size"),
        (["--gradients", "1MiB", "--hosts", "2,0"], "'0' is not a whole number of at least 1"),
        (["--gradients", "1MiB", "--hosts", "100000"], "more than 65536"),
        (["--gradients", "1MiB", "--rates", "1,-1"], "'-1' is not a number of Gbit/s"),
        (["--gradients", "1MiB", "--step-ms", "inf"], "'inf' is not a number of milliseconds"),
        (["model.py", "--option", "momentum=zero"], "write NAME=VALUE"),
    ],
)
def test_wrong_options_are_named(capsys, arguments, complaint):
    with pytest.raises(SystemExit):
        main(["predict", "-n", "2", *arguments])
    assert complaint in capsys.readouterr().err
