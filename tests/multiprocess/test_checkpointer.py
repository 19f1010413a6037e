"""A run resumes from the newest whole checkpoint, whatever happens to other checkpoints or to the disk."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.collectives.group import Group
from paceline.errors import ConfigError, ModelMismatchError
from tests.harness import kept_ranks
from tests.harness.warm import warm_python
from tests.multiprocess.test_training_state import begin, begin_elsewhere, frameworks, program

# Each writer process imports the framework again, which takes half a minute on a busy machine.
_PATIENCE_S = 300.0
patient_ranks = functools.partial(kept_ranks, deadline_s=2 * _PATIENCE_S)
STEPS, SUFFIXES = 12, {"torch": ".pt", "paddle": ".pdparams"}


@pytest.fixture
def warm_writer(request: pytest.FixtureRequest) -> str:
    """A Python that has imported the framework, for writer processes that no test signals."""
    values = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    return warm_python(values.get("framework", "torch"))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files_of(framework: str, *steps: int) -> list[str]:
    return sorted(f"step-{each:08d}{suffix}" for each in steps for suffix in (".json", SUFFIXES[framework]))


def take_steps(run: Any, checkpointer: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        losses.append(run.step())
        checkpointer.step()
    return losses


def resume_noting(run: Any, folder: Path, **options: Any) -> tuple[int, list[str]]:
    """The step at which another Checkpointer resumes, and its warnings."""
    found = []

    def resume() -> None:
        with paceline.Checkpointer(folder, run.ddp, **options) as checkpointer:
            found.append(checkpointer.resume())

    texts = warnings_of(resume)
    return found[0], texts


def damage(group: Group, path: Path, how: str) -> None:
    group.barrier()
    if group.rank == 0:
        content = path.read_bytes()
        if how == "cut":
            path.write_bytes(content[: len(content) // 2])
        elif how == "changed":
            path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        else:
            path.unlink()
    group.barrier()


@frameworks
@patient_ranks(2, framework="framework")
def test_a_run_goes_on_from_the_newest_whole_checkpoint(
    group: Group, framework: str, tmp_path: Path, warm_writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_writer)
    undisturbed = begin(framework, group)
    losses = undisturbed.steps(STEPS)
    folder = tmp_path / "checkpoints"
    stopped = begin(framework, group)
    with paceline.Checkpointer(folder, stopped.ddp, every_steps=3, keep=2) as checkpointer:
        assert checkpointer.resume() == 0 and checkpointer.nbytes == 0
        for number in range(10):
            stopped.step()
            checkpointer.step()
            if number % 3 == 2:  # so that no due checkpoint is delayed
                checkpointer.save()
        assert (checkpointer.nbytes > 0) == (group.rank == 0)
    with pytest.raises(ConfigError, match="closed"):
        checkpointer.step()
    group.barrier()
    assert names_in(folder) == files_of(framework, 6, 9)
    file = folder / f"step-00000009{SUFFIXES[framework]}"
    assert program(framework).load(file)["steps"] == 9
    manifest = json.loads((folder / "step-00000009.json").read_bytes())
    assert manifest["bytes"] == file.stat().st_size and manifest["world_size"] == 2

    resumed = begin_elsewhere(framework, group)
    with paceline.Checkpointer(folder, resumed.ddp, every_steps=3) as checkpointer:
        assert checkpointer.resume() == 9
        assert take_steps(resumed, checkpointer, 3) == losses[9:]
    assert resumed.digest() == undisturbed.digest()
    group.barrier()
    assert names_in(folder) == files_of(framework, 6, 9, 12)
    damage(group, folder / f"step-00000012{SUFFIXES[framework]}", "cut")
    steps, texts = resume_noting(resumed, folder)
    assert steps == 9 and len(texts) == (group.rank == 0)
    assert all("step-00000012" in each and "bytes" in each for each in texts)
    damage(group, folder / f"step-00000009{SUFFIXES[framework]}", "changed")
    steps, texts = resume_noting(resumed, folder)
    assert steps == 6 and len(texts) == 2 * (group.rank == 0)
    assert sum("step-00000009" in each and "SHA-256" in each for each in texts) == (group.rank == 0)
    damage(group, folder / "step-00000012.json", "removed")
    damage(group, folder / "step-00000006.json", "cut")
    steps, texts = resume_noting(resumed, folder)
    assert steps == 0 and len(texts) == 3 * (group.rank == 0)
    assert all("step-00000006.json can't be read" in each for each in texts if "00006" in each)
    assert all("no manifest" in each for each in texts if "00012" in each)


@patient_ranks(2)
def test_checkpoints_of_another_run_are_not_replaced(
    group: Group, tmp_path: Path, warm_writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_writer)
    run = begin("torch", group)
    with paceline.Checkpointer(tmp_path, run.ddp) as checkpointer:
        take_steps(run, checkpointer, 2)
        checkpointer.save()
        checkpointer.save()  # of the same step: written once
        if (child := os.fork()) == 0:  # like a loader's worker, it inherits this rank's end of all pipes
            signal.pause()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    group.barrier()
    other = begin("torch", group)
    with paceline.Checkpointer(tmp_path, other.ddp, every_steps=1) as checkpointer:
        other.step()
        with pytest.raises(ConfigError, match=r"another run(.|\n)*resume"):
            checkpointer.step()
    assert names_in(tmp_path) == files_of("torch", 2)


@patient_ranks(2)
def test_ranks_that_see_other_folders_each_have_checkpoints(
    group: Group, tmp_path: Path, warm_writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_writer)
    folder = tmp_path / f"host {group.rank}"
    run = begin("torch", group, sharded=True)
    with paceline.Checkpointer(folder, run.ddp, keep=1) as checkpointer:
        for _ in range(3):
            run.step()
            checkpointer.step()
            checkpointer.save()
        assert checkpointer.nbytes > 0
        digest, loss = run.digest(), run.step()
    assert names_in(folder) == files_of("torch", 2, 3)  # 2 is kept, because the other rank may not have 3 yet
    run = begin_elsewhere("torch", group, sharded=True)
    assert resume_noting(run, folder) == (3, [])
    assert run.digest() == digest and run.step() == loss
    if group.rank == 1:
        (folder / "step-00000003.json").unlink()
        (folder / "step-00000003.pt").unlink()
    assert resume_noting(run, folder) == (2, [])


@patient_ranks(2)
def test_the_clock_of_rank_0_decides(
    group: Group, tmp_path: Path, warm_writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_writer)
    from paceline.checkpoint import checkpointer as module

    now = [0.0]
    clock = type("Clock", (), {"monotonic": staticmethod(lambda: now[0])})
    monkeypatch.setattr(module, "time", clock)
    run = begin("torch", group)
    with paceline.Checkpointer(tmp_path, run.ddp, every_s=10.0, keep=99) as checkpointer:
        for _ in range(40):
            now[0] += 1.0 if group.rank == 0 else 0.1  # rank 1's clock is slow
            checkpointer.step()
            if checkpointer._writer is not None:
                checkpointer._writer.wait(_PATIENCE_S)
    group.barrier()
    saved = sorted(int(path.stem.removeprefix("step-")) for path in tmp_path.glob("*.json"))
    assert saved == [10, 20, 30, 40]


def pid_of_writer() -> int:
    (pid,) = (
        int(child)
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
        if b"paceline.checkpoint.writer" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return pid


def settle(group: Group, checkpointer: Any) -> None:
    """Wait until the checkpoint in progress is written or has failed."""
    if checkpointer._writer is not None:
        assert checkpointer._writer.wait(_PATIENCE_S)
    group.barrier()


def warnings_of(call: Callable[[], object]) -> list[str]:
    """The RuntimeWarnings of a call, which must point at a file of this folder."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    found = [each for each in caught if issubclass(each.category, RuntimeWarning)]
    assert {Path(each.filename).parent for each in found} <= {Path(__file__).parent}
    return [str(each.message) for each in found]


def warnings_of_step(run: Any, checkpointer: Any) -> list[str]:
    """The warnings of one step."""
    return warnings_of(lambda: take_steps(run, checkpointer, 1))


@frameworks
@patient_ranks(2, framework="framework")
def test_training_goes_on_when_the_disk_is_full(group: Group, framework: str, tmp_path: Path) -> None:
    run = begin(framework, group)
    with paceline.Checkpointer(tmp_path, run.ddp, every_steps=1, keep=9) as checkpointer:
        take_steps(run, checkpointer, 1)
        settle(group, checkpointer)
        unlimited = resource.RLIM_INFINITY
        if group.rank == 0:
            writer = pid_of_writer()
            resource.prlimit(writer, resource.RLIMIT_FSIZE, (1000, unlimited))
        take_steps(run, checkpointer, 1)
        settle(group, checkpointer)
        texts = warnings_of_step(run, checkpointer)
        settle(group, checkpointer)
        assert len(texts) == (group.rank == 0)
        assert all("step 2 could not be written" in each and "bytes are free" in each for each in texts)
        assert names_in(tmp_path) == files_of(framework, 1)
        if group.rank == 0:
            resource.prlimit(writer, resource.RLIMIT_FSIZE, (unlimited, unlimited))
        group.barrier()
        texts = warnings_of_step(run, checkpointer)
        assert len(texts) == (group.rank == 0) and all("step 3" in each for each in texts)
        settle(group, checkpointer)
        assert warnings_of_step(run, checkpointer) == []
    group.barrier()
    assert names_in(tmp_path) == files_of(framework, 1, 4, 5)


@patient_ranks(2)
def test_a_due_checkpoint_waits_for_the_writer_and_survives_its_death(group: Group, tmp_path: Path) -> None:
    run = begin("torch", group)
    with paceline.Checkpointer(tmp_path, run.ddp, every_steps=1, keep=9) as checkpointer:
        take_steps(run, checkpointer, 1)
        settle(group, checkpointer)
        if group.rank == 0:
            writer = pid_of_writer()
            os.kill(writer, signal.SIGSTOP)
        take_steps(run, checkpointer, 3)
        group.barrier()
        assert names_in(tmp_path) == files_of("torch", 1)
        group.barrier()
        if group.rank == 0:
            os.kill(writer, signal.SIGCONT)
        settle(group, checkpointer)
        assert names_in(tmp_path) == files_of("torch", 1, 2)
        group.barrier()
        if group.rank == 0:
            os.kill(writer, signal.SIGSTOP)
        take_steps(run, checkpointer, 1)
        if group.rank == 0:
            os.kill(writer, signal.SIGKILL)
        settle(group, checkpointer)
        texts = warnings_of_step(run, checkpointer)
        assert len(texts) == (group.rank == 0)
        assert all("step 5 was not written" in each and "signal 9" in each for each in texts)
    group.barrier()
    assert names_in(tmp_path) == files_of("torch", 1, 2, 6)


@patient_ranks(1)
def test_closing_waits_no_longer_than_its_timeout_for_a_writer_that_has_written(
    group: Group, tmp_path: Path
) -> None:
    run = begin("torch", group)
    checkpointer = paceline.Checkpointer(tmp_path, run.ddp)
    take_steps(run, checkpointer, 1)
    checkpointer.save()
    settle(group, checkpointer)
    writer = pid_of_writer()
    os.kill(writer, signal.SIGSTOP)
    try:
        assert warnings_of(lambda: checkpointer.close(0.0)) == []
    finally:
        os.kill(writer, signal.SIGCONT)
    assert names_in(tmp_path) == files_of("torch", 1)


@patient_ranks(2)
def test_saving_stops_waiting_at_the_models_timeout_while_nothing_is_written(
    group: Group, tmp_path: Path
) -> None:
    run = begin("torch", group, timeout_s=6)
    with paceline.Checkpointer(tmp_path, run.ddp, keep=9) as checkpointer:
        take_steps(run, checkpointer, 1)
        checkpointer.save()
        settle(group, checkpointer)
        if group.rank == 0:
            writer = pid_of_writer()
            os.kill(writer, signal.SIGSTOP)
        take_steps(run, checkpointer, 1)
        checkpointer.save()
        take_steps(run, checkpointer, 1)
        texts = warnings_of(checkpointer.save)
        assert len(texts) == (group.rank == 0)
        assert all("step 3 is not saved now: after 6 s" in each for each in texts)
        if group.rank == 0:
            os.kill(writer, signal.SIGCONT)
        settle(group, checkpointer)
        take_steps(run, checkpointer, 2)
    group.barrier()
    assert names_in(tmp_path) == files_of("torch", 1, 2, 4)


@patient_ranks(2)
def test_wrong_arguments_are_reported_on_every_rank(group: Group, tmp_path: Path) -> None:
    run = begin("torch", group)
    with pytest.raises(ConfigError, match="a wrapped model"):
        paceline.Checkpointer(tmp_path, run.ddp.module)
    with pytest.raises(ConfigError, match=r"every_steps=0|Rank 1 of 2"):
        paceline.Checkpointer(tmp_path, run.ddp, every_steps=group.rank ^ 1)
    with pytest.raises(ModelMismatchError, match="keep"):
        paceline.Checkpointer(tmp_path, run.ddp, keep=group.rank + 1)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"rank 0 of 2 can't write"):
        paceline.Checkpointer(tmp_path / "file", run.ddp)
