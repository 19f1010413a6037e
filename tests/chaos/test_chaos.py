"""A fixed part of the random faults, and tests of the judge. `make chaos` runs more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.chaos.__main__ import _judge_all
from tests.chaos.journal import Journal
from tests.chaos.judge import is_silent, judge, names
from tests.chaos.plans import KINDS, Expected, Fault, Job, Plan, for_torch, plan_of
from tests.chaos.rank import Report
from tests.chaos.reference import first_weights, weights_after
from tests.chaos.report import Row
from tests.chaos.strikes import signal_of
from tests.chaos.trial import Ended, Result
from tests.harness.command import ROOT, run_module
from tests.harness.warm import warm_python

_DEADLINE_S = 500


def chaos(*arguments: str, framework: str = "torch") -> tuple[int, str]:
    """Run the driver; return its status and output."""
    python = warm_python(framework)
    return run_module("tests.chaos", *arguments, deadline_s=_DEADLINE_S, python=python)


def test_faults_in_jobs_of_torch(tmp_path):
    jobs = ("--faults", "70", "--paddle", "0", "--launched", "0")
    status, output = chaos("--seed", "0", *jobs, "--rows", str(tmp_path / "rows"))
    assert status == 0, output
    assert "killed by SIGKILL" in output


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="PaddlePaddle has no wheels for it")
def test_faults_in_jobs_of_paddle(tmp_path):
    pytest.importorskip("paddle")
    jobs = ("--faults", "10", "--paddle", "100", "--launched", "0")
    status, output = chaos("--seed", "0", *jobs, "--rows", str(tmp_path / "rows"), framework="paddle")
    assert status == 0, output


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="PaddlePaddle has no wheels for it")
def test_a_rank_of_paddle_that_closes_all_descriptors_is_named():
    pytest.importorskip("paddle")
    status, output = chaos("--one", "68", "--framework", "paddle", framework="paddle")
    assert status == 0, output
    assert "3 of 3 name it" in output


def test_a_run_that_was_killed_goes_on(tmp_path):
    rows, arguments = tmp_path / "rows", ["--faults", "12", "--paddle", "0", "--launched", "0"]
    command = [sys.executable, "-m", "tests.chaos", *arguments, "--at-once", "1", "--rows", str(rows)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        deadline = time.monotonic() + _DEADLINE_S
        while not rows.exists() or rows.read_bytes().count(b"\n") < 4:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    before = rows.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    assert len(Journal(rows).rows("torch")) < 12
    status, output = chaos("--resume", str(rows))
    assert status == 0, output
    assert rows.read_bytes().startswith(before)  # existing rows were not made again
    assert [row.seed for row in Journal(rows).rows("torch")] == list(range(12))
    assert "random faults in training jobs" in output


def test_a_row_outlives_the_file_it_was_written_to(tmp_path):
    journal = Journal.begin(tmp_path / "rows", {"seed": 3})
    row = Row.of(result("SIGKILL", _LOST, _KILLED, _LOST))
    wrong = Row.of(result("slow", _DONE, _DONE, _DONE, left=("process 7",)))
    journal.add("torch", row)
    journal.add("paddle", wrong)
    with journal.path.open("a") as file:
        file.write('{"part": "torch", "row": {"se')  # the machine went down
    again = Journal(journal.path)
    assert again.asked == {"seed": 3}
    assert again.rows("torch") == [row]
    assert again.rows("paddle") == [wrong]
    assert again.rows("launched") == []
    assert again.spent_s > 0
    again.add("torch", replace(row, seed=1))
    assert [row.seed for row in Journal(journal.path).rows("torch")] == [0, 1]
    with pytest.raises(FileExistsError):
        Journal.begin(journal.path, {})


def test_trials_with_a_row_are_not_made_again(tmp_path):
    journal, made = Journal.begin(tmp_path / "rows", {}), []

    def run(plans):
        for plan in plans:
            if plan.seed == 2 and not made.count(2):
                made.append(2)
                raise KeyboardInterrupt
            made.append(plan.seed)
            yield replace(result("slow", _DONE, _DONE, _DONE), plan=plan)

    slow = result("slow", _DONE, _DONE, _DONE).plan
    plans = [replace(slow, seed=seed) for seed in range(4)]
    with pytest.raises(KeyboardInterrupt):
        _judge_all(plans, run, journal, "torch")
    _judge_all(plans, run, Journal(journal.path), "torch")
    assert made == [0, 1, 2, 2, 3]
    assert [row.seed for row in journal.rows("torch")] == [0, 1, 2, 3]


def test_a_fault_under_a_launcher():
    # A launcher that is struck must be a single process, as it is for a user, so its Python is a real one.
    status, output = run_module("tests.chaos", "--one", "7", "--launcher", deadline_s=_DEADLINE_S)
    assert status == 0, output


def test_a_seed_makes_the_same_plan():
    assert [plan_of(seed) for seed in range(50)] == [plan_of(seed) for seed in range(50)]


def test_every_kind_is_chosen_and_strikes_another_rank_each_time():
    plans = [plan_of(seed) for seed in range(3000)]
    assert {plan.fault.kind for plan in plans} == set(KINDS)
    assert {plan.fault.rank for plan in plans} == {0, 1, 2, 3}


def test_what_is_given_to_torch_can_strike_there():
    """From outside only signals strike; and no fault strikes at a point of our core."""
    given = [plan for seed in range(3000) if (plan := for_torch(plan_of(seed))) is not None]
    assert len(given) > 500
    for plan in given:
        assert not plan.fault.place.startswith("core")
        assert not plan.fault.place.startswith("outside") or signal_of(plan.fault)


def test_the_reference_computes_gradients():
    """The gradient of one step, against differences of the loss: the sum over ranks of the mean squared
    error."""
    from tests.chaos.reference import _gradients, batch

    weights = [each.astype(np.float64) for each in first_weights(16)]
    inputs, targets = batch(0, 0, 0)

    def loss():
        hidden = np.tanh(np.tanh(inputs @ weights[0] + weights[1]) @ weights[2] + weights[3])
        return ((hidden @ weights[4] + weights[5] - targets) ** 2).mean()

    for place, gradient in zip(weights, _gradients(weights, inputs, targets)):
        before, place.flat[3] = place.flat[3], place.flat[3] + 1e-6
        higher = loss()
        place.flat[3] = before - 1e-6
        assert (higher - loss()) / 2e-6 == pytest.approx(gradient.flat[3], rel=1e-5)
        place.flat[3] = before


# --- the judge: each finding that it must make ---

_JOB = Job("torch", 3, "memory", "copy", 16)
_LAST = [each.astype(np.float32) for each in weights_after(_JOB)[-1]]
_THIRD = [each.astype(np.float32) for each in weights_after(_JOB)[3]]
_DONE = Ended(0, Report("done", 9.0, steps=6, weights=_LAST))
_LOST = Ended(1, Report("raised", 5.1, "PeerLostError", "Rank 1 of 3 died.", True, (1,), 3, _THIRD))
_KILLED = Ended(-signal.SIGKILL, None)


def result(kind: str, *ranks: Ended, left: tuple[str, ...] = (), was_struck: bool = True) -> Result:
    """The result of a trial in which rank 1 of three was struck at 5 s."""
    found = next(each for each in KINDS if each.name == kind)
    plan = Plan(0, _JOB, Fault(found, 1, 3, "in forward", 0.5))
    return Result(plan, ranks, 5.0, was_struck, False, left, 1.0)


def said(**of_report: object) -> Ended:
    """A survivor's end with these differences."""
    assert _LOST.report is not None
    return replace(_LOST, report=replace(_LOST.report, **of_report))


def test_a_death_that_all_survivors_report_is_right():
    verdict = judge(result("SIGKILL", _LOST, _KILLED, _LOST))
    assert not verdict.wrong
    assert (verdict.named, verdict.survivors) == (2, 2)
    assert verdict.seconds == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ((_LOST, _KILLED, _DONE), "rank 2 ended well"),
        ((_LOST, _KILLED, Ended(-9, None, "hung")), "rank 2 hung"),
        ((_LOST, _KILLED, Ended(0, None)), "rank 2 ended without a word"),
        ((_LOST, _KILLED, said(ranks=(), text="Something broke.")), "do not name the rank"),
        ((_LOST, _KILLED, said(ranks=(0,), text="Rank 0 of 3 died.")), "blames [0]"),
        ((_LOST, _KILLED, said(is_ours=False)), "not of ours"),
        ((_LOST, _KILLED, said(weights=_LAST)), "rank 2 has other weights than the reference after 3"),
        ((_LOST, _KILLED, said(steps=4, weights=_LAST)), "good backward passes"),
        ((_LOST, _KILLED, said(at_s=60.0)), "raised after 55.0 s"),
        ((_LOST, _DONE, _LOST), "rank 1, which was struck, ended well"),
    ],
)
def test_a_death_that_a_survivor_does_not_report_is_found(ranks, found):
    wrong = judge(result("SIGKILL", *ranks)).wrong
    assert any(found in each for each in wrong), wrong


def test_a_signal_from_outside_may_come_after_the_end():
    """A signal at a point of the loop may not: the rank that passes this point has more steps to make."""
    killed = result("SIGKILL", _DONE, _DONE, _DONE)
    assert any("ended well" in each for each in judge(killed).wrong)
    fault = replace(killed.plan.fault, place="outside")
    assert not judge(replace(killed, plan=replace(killed.plan, fault=fault))).wrong
    lost = replace(killed, ranks=(_DONE, _KILLED, _DONE), plan=replace(killed.plan, fault=fault))
    assert any("ended well" in each for each in judge(lost).wrong)


def test_torchs_own_words_count_only_while_its_group_may_be_forming():
    """A rank in torch's init_process_group() gets torch's error for the death, which names no rank."""
    by_torch = said(kind="RuntimeError", text="Connection closed by peer", is_ours=False, ranks=(), steps=0)
    killed = result("SIGKILL", by_torch, _KILLED, _LOST)
    fault = replace(killed.plan.fault, place="wrapping")

    def verdict(way: str, fault: Fault) -> tuple[str, ...]:
        survivor = replace(by_torch.report, weights=[each.astype(np.float32) for each in first_weights(16)])
        changed = replace(killed, ranks=(replace(by_torch, report=survivor), _KILLED, _LOST))
        return judge(
            replace(changed, plan=replace(killed.plan, job=replace(_JOB, way=way), fault=fault))
        ).wrong

    assert not verdict("gloo", fault)
    assert any("1 of 2 survivors do not name" in each for each in verdict("memory", fault))
    assert any("1 of 2 survivors do not name" in each for each in verdict("gloo", killed.plan.fault))


def test_a_fault_that_must_do_no_harm():
    assert not judge(result("slow", _DONE, _DONE, _DONE)).wrong
    other = Ended(0, Report("done", 9.0, steps=6, weights=_THIRD))
    assert any("other weights" in each for each in judge(result("slow", _DONE, other, _DONE)).wrong)
    assert any("rank 1 raised" in each for each in judge(result("slow", _DONE, _LOST, _DONE)).wrong)


def test_what_is_left_behind_is_found():
    assert judge(result("slow", _DONE, _DONE, _DONE, left=("process 7",))).wrong == (
        "left behind: process 7",
    )


def test_what_is_silent():
    drifted = Ended(0, Report("done", 9.0, steps=6, weights=_THIRD))
    assert is_silent(result("step skipped", _DONE, drifted, _DONE))
    assert not is_silent(result("step skipped", _LOST, drifted, _LOST))
    assert not is_silent(result("slow", _DONE, _DONE, _DONE))


def test_an_innocent_rank_that_is_late_on_a_busy_machine_says_nothing():
    late = said(kind="DeadlineError", text="Rank 2 of 3 did not arrive within 2.0 s.", ranks=(2,), at_s=5.5)
    stop = result("SIGSTOP", late, _KILLED, late)
    assert judge(stop).is_void
    impatient = replace(stop, plan=replace(stop.plan, timeout_s=0.5))  # so rank 2 was the one stopped
    assert any("blames [2]" in each for each in judge(impatient).wrong)
    text = "Rank 1 of 3 did not come within 2.0 s."
    absent = said(kind="RendezvousError", text=text, ranks=(1,), at_s=5.5)
    forming = result("SIGSTOP", absent, absent, absent, was_struck=False)
    assert judge(forming).wrong
    assert judge(replace(forming, plan=replace(forming.plan, timeout_s=2.0))).is_void


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("Rank 1 of 3 died.", True),
        ("Rank 0 of 3 lost ranks 1-2.", True),
        ("Rank 1 of 3 could not average gradients.", False),
        ("Ranks 0 and 2 disagree.", False),
        ("The replicas differ\n  seen  ranks 0, 2: a\n        rank 1: b", True),
        ("Connection closed by peer [127.0.0.1]:1234", False),
    ],
)
def test_who_is_named_by_a_text(text, is_named):
    assert names(Report("raised", 0.0, text=text), (1,)) is is_named


def test_what_must_come_of_a_kind_is_known():
    assert {kind.expected for kind in KINDS} >= {
        Expected.RAISED,
        Expected.FINE,
        Expected.EITHER,
        Expected.LATER,
    }
