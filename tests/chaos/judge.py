"""Judges how the ranks of a trial ended. Pure; independent of the framework.

- No hang: every rank has ended by itself, except a rank that a fault had stopped.
- No silent error: a rank that finished has the weights of the reference. A rank that raised has those of the
  reference after the same number of steps. If the gradients go through memory, all survivors made the same
  number.
- Every survivor names the struck rank, in a field of the error or in its text, and blames no other.
- Nothing is left behind.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.chaos.plans import PATIENT_S, Expected, Plan
from tests.chaos.rank import Array, Report
from tests.chaos.reference import weights_after
from tests.chaos.trial import Ended, Result

_SLACK_S = 20.0
"""The time for an error to arrive, after the time-out if it depends on that: generous, for a busy machine."""
_TOLERANCE = 2e-4


@dataclass(frozen=True)
class Verdict:
    """The judgement of a trial.

    Attributes:
        wrong: Findings, in words; empty: no fault was found.
        outcome: The result, in words.
        survivors: How many ranks outlived the fault and raised.
        named: How many of those named the rank that was struck.
        seconds: From the fault to each survivor's exception; empty if the time of the fault is unknown.
        is_void: An innocent rank was late, on a busy machine: the trial is void and must be repeated.
    """

    wrong: tuple[str, ...]
    outcome: str
    survivors: int = 0
    named: int = 0
    seconds: tuple[float, ...] = ()
    is_void: bool = False


def judge(result: Result) -> Verdict:
    """Judge a trial of Paceline."""
    plan = result.plan
    if was_early(result):
        return Verdict((), "an innocent rank was late", is_void=True)
    wrong = [f"left behind: {each}" for each in result.left]
    wrong += [f"rank {rank} hung" for rank, ended in enumerate(result.ranks) if ended.how == "hung"]
    wrong += [
        f"rank {rank}: the driver failed"
        for rank, ended in enumerate(result.ranks)
        if ended.status in (70, 71)
    ]
    if not result.was_struck:
        # A rank that was killed after its end has finished.
        wrong += _judge_fine(result, [rank for rank in range(plan.job.world_size) if rank != plan.fault.rank])
        return Verdict(tuple(wrong), "did not strike")
    expected = plan.expected
    all_ranks = range(plan.job.world_size)
    others = [rank for rank in all_ranks if rank not in plan.fault.struck]
    if expected is Expected.FINE:
        outcome = "trained on"
        wrong += _judge_fine(result, all_ranks)
    elif _may_be_too_late(result) and all(_report(result.ranks[rank]).how == "done" for rank in others):
        outcome = "no rank needed it any more"
        wrong += _judge_fine(result, others)
    elif expected is Expected.EVEN:
        outcome = "trained on"
        wrong += [f"rank {rank} raised" for rank in all_ranks if _report(result.ranks[rank]).how != "done"]
        wrong += _judge_equal([_report(ended) for ended in result.ranks])
    elif expected is Expected.RAISED:
        outcome = "all raised"
        wrong += _judge_all_raised(result, others)
    elif expected is Expected.EITHER:
        is_fine = all(_report(ended).how == "done" for ended in result.ranks)
        outcome = "trained on" if is_fine else "all raised"
        wrong += _judge_fine(result, all_ranks) if is_fine else _judge_all_raised(result, others)
    elif expected is Expected.WARNED:
        outcome = "warned"
        wrong += [f"rank {rank} was not warned" for rank in all_ranks if not _is_warned(result.ranks[rank])]
    elif expected is Expected.HELD:
        outcome = "trained on, and was stopped"
        wrong += _judge_equal([_report(ended) for ended in result.ranks])
        wrong += [f"rank {rank} raised" for rank in all_ranks if _report(result.ranks[rank]).how != "done"]
    elif expected is Expected.ENDED:
        outcome = "all ended"  # no rank is to blame
    elif expected is Expected.LATER:
        outcome = "others raised at its end"
        wrong += _judge_raised(result, others)
    else:
        outcome = "raised at its end"
        wrong += _judge_raised(result, plan.fault.struck)
        wrong += _judge_equal([_report(result.ranks[rank]) for rank in others])
    wrong += _judge_launcher(result)
    if expected is Expected.ENDED:
        others = []
    raised = [_report(result.ranks[rank]) for rank in others if _report(result.ranks[rank]).how == "raised"]
    named = sum(names(report, plan.fault.struck) for report in raised)
    # A rank that is still in torch's own init_process_group() raises torch's own error about the death.
    owed = [report for report in raised if report.is_ours or not plan.is_while_wrapping_over_others]
    silent = sum(not names(report, plan.fault.struck) for report in owed)
    if silent and plan.must_name:
        wrong.append(f"{silent} of {len(owed)} survivors do not name the rank that was struck")
    for report in raised:
        innocent = set(report.ranks) - set(plan.fault.struck)
        if innocent and not _may_blame(plan) and not names(report, plan.fault.struck):
            wrong.append(f"a survivor blames {sorted(innocent)}")
    seconds = tuple(report.at_s - result.struck_s for report in raised) if result.struck_s else ()
    bound_s = _SLACK_S + (plan.timeout_s if plan.is_late else 0.0)
    if expected is not Expected.LATER and any(each > bound_s for each in seconds):
        wrong.append(f"raised after {max(seconds):.1f} s")
    return Verdict(tuple(wrong), outcome, len(raised), named, seconds)


def _may_be_too_late(result: Result) -> bool:
    """A fault at a random moment may strike when the other ranks need nothing more from this one."""
    is_chance = result.plan.fault.place.startswith(("outside", "core"))
    # A process under a launcher may have finished when the signal arrives.
    is_done = all(_report(result.ranks[rank]).how == "done" for rank in result.plan.fault.struck)
    return result.plan.expected is Expected.RAISED and (result.was_last or is_done) and is_chance


def was_early(result: Result) -> bool:
    """True if a rank gave up on another one before the fault struck: a busy machine gave that one no core."""
    reports = [_report(ended) for ended in result.ranks]
    if not result.was_struck and result.plan.timeout_s < PATIENT_S:
        late = ("gave up", "did not arrive", "did not come")
        return any(
            report.kind in ("DeadlineError", "RendezvousError")
            and any(words in report.text for words in late)
            for report in reports
        )
    return any(
        report.kind in ("DeadlineError", "RendezvousError")
        and result.struck_s
        and report.at_s < result.struck_s + result.plan.timeout_s * 0.9
        and ("gave up" in report.text or "did not arrive" in report.text)
        and not names(report, result.plan.fault.struck)
        for report in reports
    )


def names(report: Report, struck: Sequence[int]) -> bool:
    """True if an error names one of these ranks."""
    if set(report.ranks) & set(struck):
        return True
    text = report.text
    # If no majority shows which side is right, `ranks` are one side, and the text lists what each did.
    if report.ranks and report.kind != "ReplicasDifferError":
        # The quoted error of a rank that raised first, for the same cause.
        _, found_quote, text = text.partition("Error: ")
        if not found_quote:
            return False
    # The rank's own number stands first, as in "Rank 0 of 3 lost ...": that does not blame a rank.
    own = re.match(r"[Rr]ank (\d+) of \d+ (could|gave up|lost)", text)
    if own:
        text = text[own.end() :]
    found: set[int] = set()
    for numbers in re.findall(r"[Rr]anks? ((?:\d+(?:-\d+)?(?:, | and )?)+)", text):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", numbers):
            found.update(range(int(first), int(last or first) + 1))
    return bool(found & set(struck))


def _judge_fine(result: Result, ranks: Sequence[int]) -> list[str]:
    wrong = []
    for rank in ranks:
        ended = result.ranks[rank]
        report = _report(ended)
        if report.how != "done" or ended.status != 0:
            wrong.append(f"rank {rank} {report.how or 'ended'} ({report.kind}), status {ended.status}")
        elif not _is_reference(result.plan, report, at_its_end=True):
            wrong.append(f"rank {rank} ended well with other weights than the reference")
    return wrong + _judge_equal([_report(result.ranks[rank]) for rank in ranks])


def _judge_all_raised(result: Result, others: Sequence[int]) -> list[str]:
    wrong = _judge_raised(result, others)
    for rank in result.plan.fault.struck:
        if _report(result.ranks[rank]).how == "done":
            wrong.append(f"rank {rank}, which was struck, ended well")
    if result.plan.expected is Expected.RAISED and result.plan.fault.kind.name in (
        "step skipped",
        "step too many",
    ):
        return wrong  # the guilty rank's weights are part of the error
    reports = [_report(result.ranks[rank]) for rank in others]
    for rank, report in zip(others, reports):
        if report.weights and not _is_reference(result.plan, report, at_its_end=False):
            wrong.append(f"rank {rank} has other weights than the reference after {report.steps} steps")
    made = {report.steps for report in reports if report.how == "raised"}
    if result.plan.job.is_in_memory and len(made) > 1:
        wrong.append(f"survivors made {sorted(made)} good backward passes")
    return wrong


def _judge_launcher(result: Result) -> list[str]:
    """The launcher's status must show how the job ended; Paceline's also names the first rank to fail."""
    if result.launcher is None:
        return []
    status, printed = result.launcher
    if result.plan.expected is Expected.FINE:
        wrong = [f"the launcher ended with status {status}"] if status else []
        if result.plan.fault.kind.family == "full disk" and "cannot be written" not in printed:
            wrong.append("the launcher does not say what could not be written")
        return wrong
    if result.plan.expected is Expected.HELD:
        is_named = all(f"rank {rank} of" in printed for rank in result.plan.fault.struck)
        wrong = [] if is_named else ["the launcher does not name the rank that does not end"]
        is_stopped = status == 124 or (status == 1 and "exit status 124 of its launcher" in printed)
        return wrong if is_stopped else [*wrong, f"the launcher ended with status {status}"]
    wrong = [] if status else ["the launcher ended well"]
    is_ours = result.plan.job.launcher.startswith("paceline")
    named = any(re.search(rf"[Rr]ank {rank} of", printed) for rank in result.plan.fault.struck)
    if is_ours and result.plan.expected is Expected.RAISED and not named:
        wrong.append("the launcher does not name the rank that was struck")
    return wrong


def _judge_raised(result: Result, ranks: Sequence[int]) -> list[str]:
    is_forming = result.plan.is_while_wrapping_over_others
    wrong = []
    for rank in ranks:
        ended, report = result.ranks[rank], _report(result.ranks[rank])
        if report.how == "done":
            wrong.append(f"rank {rank} ended well")
        elif report.how != "raised":
            # torchrun ends the others as soon as one has failed, most often before they can print an error.
            if ended.how != "hung" and result.plan.job.launcher != "torchrun":
                wrong.append(f"rank {rank} ended without a word, status {ended.status}")
        elif not report.is_ours and result.plan.must_name and not is_forming:
            wrong.append(f"rank {rank} raised {report.kind}, which is not of ours")
    return wrong


def _judge_equal(reports: Sequence[Report]) -> list[str]:
    """All ranks that ended well must have the same bits."""
    done = [report.weights for report in reports if report.how == "done"]
    for other in done[1:]:
        if not all(np.array_equal(one, two) for one, two in zip(done[0], other, strict=True)):
            return ["ranks that ended well have different weights"]
    return []


def _is_reference(plan: Plan, report: Report, *, at_its_end: bool) -> bool:
    after = weights_after(plan.job)
    wanted = after[-1] if at_its_end else after[min(report.steps, len(after) - 1)]
    return len(wanted) == len(report.weights) and all(_is_close(*two) for two in zip(report.weights, wanted))


def _is_close(found: Array, wanted: Array) -> bool:
    return found.shape == wanted.shape and bool(np.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE))


def _is_warned(ended: Ended) -> bool:
    is_warned = "RuntimeWarning" in ended.output and "differ" in ended.output
    return is_warned or _report(ended).how == "raised"


def _may_blame(plan: Plan) -> bool:
    """If no majority shows which side is right, both sides are named."""
    return plan.fault.kind.name in ("step skipped", "step too many") and plan.job.world_size % 2 == 0


def _report(ended: Ended) -> Report:
    return ended.report or Report("", 0.0)


def is_silent(result: Result) -> bool:
    """True if all ranks of a job finished although their weights are wrong."""
    if not result.was_struck or any(_report(ended).how != "done" or ended.status for ended in result.ranks):
        return False
    reports = [_report(ended) for ended in result.ranks]
    is_right = all(_is_reference(result.plan, report, at_its_end=True) for report in reports)
    return bool(_judge_equal(reports)) or (not is_right and result.plan.expected is not Expected.EVEN)
