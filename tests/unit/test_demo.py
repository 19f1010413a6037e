"""The report of examples/demo.py on its runs; tests/pages/test_examples.py makes them."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_of_examples", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def said(
    demo: ModuleType, ours: list[float | None], alone: list[float | None], theirs: list[float | None]
) -> str:
    framework = demo.FRAMEWORKS["torch"]
    runs = [
        [speed if speed is None else demo.Run(0.98, speed, True, {}) for speed in speeds]
        for speeds in (ours, alone, theirs)
    ]
    return demo.conclusion(framework, demo.ways_of(framework, 2, 2), runs)


def test_it_pays_only_if_every_round_says_so(demo: ModuleType) -> None:
    pays = said(demo, [150, 160, 170], [100, 100, 100], [80, 80, 80])
    assert pays.startswith("It is faster here: 2 processes train 1.60x (1.50 to 1.70) as fast as one process")
    assert "They train 2.00x (1.88 to 2.12) as fast as with torch's DDP." in pays
    unsure = said(demo, [150, 160, 90], [100, 100, 100], [80, 200, 80])
    assert unsure.startswith(
        "Whether it is faster here can't be told: 2 processes reach 1.50x (0.90 to 1.60)"
    )
    assert "Against torch's DDP: 1.12x (0.80 to 1.88)." in unsure
    assert said(demo, [80, 81, 82], [100] * 3, [50] * 3).startswith(
        "It does not pay here: 2 processes reach 0.81x"
    )
    assert said(demo, [200, 200], [100, 100], [50, 50]).startswith(
        "Fewer than 3 rounds tell nothing for sure"
    )


def test_the_command_that_it_names_can_be_typed(demo: ModuleType, monkeypatch, tmp_path: Path) -> None:
    command = tmp_path / "env" / "bin" / "paceline"
    command.parent.mkdir(parents=True)
    command.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(command.with_name("python")))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert demo.installed_command() == str(command)
    monkeypatch.chdir(tmp_path)
    assert demo.installed_command() == "env/bin/paceline"
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")  # as after `. env/bin/activate`
    assert demo.installed_command() == "paceline"


def test_a_round_that_was_slow_for_all_counts_as_any(demo: ModuleType) -> None:
    ratio = demo.ratio(*[[demo.Run(1, speed, True, {}) for speed in each] for each in ([30, 300], [20, 200])])
    assert str(ratio) == "1.50x"


def test_runs_of_other_bits_are_reported(demo: ModuleType) -> None:
    one, other = (demo.Run(1, 1, True, {"weight": np.array([value], np.float32)}) for value in (0.0, -0.0))
    assert demo.same_bits([one, one])
    assert not demo.same_bits([one, other])


def test_what_could_not_be_measured_is_said(demo: ModuleType, capsys) -> None:
    assert said(demo, [None], [100], [50]).startswith("Whether it is faster here could not be measured")
    text = said(demo, [150, 160, 170], [100, None, 100], [None, None, None])
    assert text.startswith("It is faster here: 2 processes train 1.60x (1.50 to 1.70)")
    assert "Against torch's DDP: could not be measured." in text
    framework = demo.FRAMEWORKS["torch"]
    weights = {"weight": np.zeros(3, np.float32)}
    for missing in range(3):
        runs = [[demo.Run(0.98, 100.0, True, weights)] for _ in range(3)]
        runs[missing] = [None]
        demo.show(framework, demo.ways_of(framework, 2, 2), runs)
        assert "could not be measured" in capsys.readouterr().out
    demo.show(framework, demo.ways_of(framework, 2, 2), [[], [], []])


SCRIPT = """
import json, os, resource, signal, sys
import numpy as np
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(sys.argv[0] + ".calls", "a") as calls:
    calls.write("x")
print("digits: step 1 of 2, epoch 1, loss 1", flush=True)
if {waits}:
    signal.pause()
if {writes}:
    np.savez(options["--save"], weight=np.ones(3))
    report = dict(accuracy=0.5, samples_per_s=7.0, replicas_are_identical=True)
    with open(options["--report"], "w") as file:
        json.dump(report, file)
if {crashes}:
    print("terminate called without an active exception", file=sys.stderr, flush=True)
    os.abort()
"""


def try_script(
    demo: ModuleType, folder: Path, *, is_incumbent: bool, limit_s: float = 240, **does: bool
) -> tuple:
    """The demo's result for a script, how often it was started, and the printed lines."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(**{"waits": False, "writes": False, "crashes": False, **does}))
    framework = dataclasses.replace(demo.FRAMEWORKS["paddle"], script=script)
    way = demo.Way("theirs", 1, is_incumbent=is_incumbent)
    lines: list[str] = []
    found = demo.try_to_run(framework, way, 3, limit_s, "round 1: theirs", lines.append)
    return found, len(calls.read_text()) if (calls := Path(f"{script}.calls")).exists() else 0, lines


def test_an_incumbent_that_crashes_after_its_report_counts(demo: ModuleType, tmp_path: Path) -> None:
    found, calls, lines = try_script(demo, tmp_path, is_incumbent=True, writes=True, crashes=True)
    assert found.samples_per_s == 7.0 and found.weights["weight"].tolist() == [1, 1, 1]
    assert calls == 1
    assert lines[-1].startswith("round 1: theirs: trained, and its process then crashed (killed by SIGABRT")
    assert "pytorch#190489" in lines[-1]


def test_an_incumbent_that_crashes_before_has_one_more_try(demo: ModuleType, tmp_path: Path) -> None:
    found, calls, lines = try_script(demo, tmp_path, is_incumbent=True, crashes=True)
    assert found is None and calls == 2
    crashes = [line for line in lines if line.startswith("round 1: theirs: crashed (killed by SIGABRT")]
    assert len(crashes) == 2


def test_our_own_crash_is_an_error(demo: ModuleType, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        try_script(demo, tmp_path, is_incumbent=False, writes=True, crashes=True)
    assert caught.value.code == 134
    assert "killed by SIGABRT" in capsys.readouterr().err


def test_a_run_that_takes_too_long_is_reported_and_no_error(demo: ModuleType, tmp_path: Path) -> None:
    found, _, lines = try_script(demo, tmp_path, is_incumbent=False, limit_s=10, waits=True)
    assert found is None
    assert lines[-1] == "round 1: theirs: could not be measured within 10 s; this machine is too busy"
