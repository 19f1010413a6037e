"""A job that is stopped by signals at random moments and resumed ends with the bits of an undisturbed run.

Each launch resumes from the checkpoint of the one before. Its ranks print what they are about to do. The
driver picks one of these lines at random and, a moment after it, sends SIGTERM or SIGUSR1 to the launcher or
to a rank.

    python -m tests.multiprocess.preempted FOLDER COUNT SEED [torch|paddle] [paceline|torchrun]
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.command import started_module

RANKS = 2
STEPS, EVERY, EVALUATE_EVERY = 60, 10, 4
PREEMPTED = 75
# Each is drawn with the same probability. "first forward" is the first one of a launch; "import" and "ready"
# come once.
MOMENTS = ("import", "ready", "loading", "forward", "backward", "evaluation", "writing", "first forward")
DEADLINE_S = 300.0


def say(*words: object) -> None:
    rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
    line = " ".join(map(str, (rank, *words)))
    os.write(1, f"{line}\n".encode())  # in one write, unlike print() to an unbuffered stream


def train(folder: Path, framework: str) -> None:
    """One rank's program: train, evaluate now and then, and print before each part what comes next."""
    say("import", os.getpid())
    import paceline
    from tests.multiprocess.test_training_state import begin

    with paceline.init() as group:
        run = begin(framework, group)
        run._batches = _announced(run._batches)
        run.ddp.module.register_forward_pre_hook(lambda *_: say("forward"))
        hooked = run.ddp.module
        after = hooked.register_forward_hook if framework == "torch" else hooked.register_forward_post_hook
        after(lambda *_: say("backward"))
        with paceline.Checkpointer(folder, run.ddp, every_steps=EVERY) as checkpointer:
            say("ready")
            steps = checkpointer.resume()
            say("resumed", steps)
            while steps < STEPS:
                run.step()
                say("writing" if (steps + 1) % EVERY == 0 else "loading")
                steps += 1
                try:
                    checkpointer.step()
                except SystemExit as error:
                    say("stopped", steps, error.code)
                    raise
                say("made", steps)
                if steps % EVALUATE_EVERY == 0:
                    say("evaluation")
                    time.sleep(0.05)
            say("over", run.digest())


def _announced(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        say("loading")
        time.sleep(0.002)
        yield next(batches)


@dataclass
class Launch:
    """The outcome of one launch."""

    status: int = 0
    lines: list[str] = field(default_factory=list)
    sent_after: int | None = None  # number of lines read before the signal was sent

    def reported(self, word: str) -> dict[int, list[str]]:
        """The last line of each rank with this word, split, without the rank and the word."""
        found = {}
        for line in self.lines:
            rank, _, rest = line.partition(" ")
            if rank.isdigit() and rest.split(" ")[:1] == [word]:
                found[int(rank)] = rest.split(" ")[1:]
        return found


def launch(folder: Path, framework: str, launcher: str, draw: random.Random | None) -> Launch:
    """Run the job once, and send it a signal at a random moment if `draw` is given."""
    start = {
        "paceline": ["paceline", "run", "-n", str(RANKS), "--prefix", "never", "--preempt-s", "250", "-m"],
        "torchrun": ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m"],
    }[launcher]
    command = [*start, __spec__.name, str(folder), "train", framework]
    # A writer process imports the framework again, which on a busy machine takes longer than the 30 s that a
    # launcher waits by default.
    patience = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "250"}
    made, pids = Launch(), {}
    moment, count = (draw.choice(MOMENTS), draw.randint(1, 12)) if draw else ("", 0)
    if moment in ("import", "ready", "first forward"):
        moment, count = moment.removeprefix("first "), 1
    with started_module(*command, python=sys.executable, env=os.environ | patience) as process:
        assert process.stdout is not None
        for line in process.stdout:
            made.lines.append(line.rstrip("\n"))
            rank, word, *rest = [*made.lines[-1].split(" "), "", ""]
            if word == "import":
                pids[rank] = int(rest[0])
            count -= word == moment and len(pids) == RANKS
            if draw is None or count or made.sent_after is not None or len(pids) < RANKS:
                continue
            until = time.monotonic() + draw.choice((0.0, draw.uniform(0.0, 0.003), draw.uniform(0.0, 0.1)))
            while time.monotonic() < until:
                pass
            target = draw.choice((process.pid, *pids.values()))
            ends_agent = launcher == "torchrun" and target == process.pid
            signum = signal.SIGTERM if ends_agent else draw.choice((signal.SIGTERM, signal.SIGUSR1))
            made.sent_after = len(made.lines)
            try:
                os.kill(target, signum)
            except ProcessLookupError:
                made.sent_after = None
        made.status = process.wait(DEADLINE_S)
    return made


def check(made: Launch, launcher: str, resumes_at: int) -> int | None:
    """Check a launch. Returns the step at which the next one resumes; None: the job is complete."""
    resumed, stopped = made.reported("resumed"), made.reported("stopped")
    if resumed:
        assert resumed == {rank: [str(resumes_at)] for rank in range(RANKS)}, "not resumed where it stopped"
    if len(made.reported("over")) == RANKS:
        return None
    if stopped:
        step, code = next(iter(stopped.values()))
        assert stopped == {rank: [step, code] for rank in range(RANKS)} and code == str(PREEMPTED), (
            "the ranks stopped differently"
        )
        assert launcher != "paceline" or made.status == PREEMPTED, "the launcher exited with another status"
        return int(step)
    is_early = made.sent_after is not None and len(reported_before(made, "ready")) < RANKS
    assert is_early, "it has ended without a checkpoint of its last step"
    return resumes_at


def reported_before(made: Launch, word: str) -> dict[int, list[str]]:
    return Launch(lines=made.lines[: made.sent_after]).reported(word)


def disturb(
    folder: Path, count: int, seed: int, framework: str = "torch", launcher: str = "paceline"
) -> None:
    """Send `count` signals to jobs, resume them, and compare each complete job with an undisturbed one."""
    draw = random.Random(seed)
    undisturbed = launch(folder / "undisturbed", framework, launcher, None)
    digests = undisturbed.reported("over")
    assert undisturbed.status == 0 and len(digests) == RANKS, undisturbed.lines
    sent, ends, job, at = 0, Counter(), 0, 0
    while sent < count or at:
        made = launch(folder / f"{job}", framework, launcher, draw if sent < count else None)
        sent += made.sent_after is not None
        try:
            following = check(made, launcher, at)
            if following is None:
                assert made.reported("over") == digests, "the digest differs from the undisturbed one"
        except AssertionError as error:
            raise AssertionError(
                "\n".join([str(error), f"job {job}, signal {sent}", *made.lines[-60:]])
            ) from error
        ends["over" if following is None else "stopped" if following != at else "before a step"] += 1
        if following is None:
            job, at = job + 1, 0
        else:
            at = following
    print(f"{framework}, {launcher}: {sent} signals, seed {seed}: {dict(ends)}; the same hash in {job} jobs")


if __name__ == "__main__":
    where, what, *rest = sys.argv[1:]
    if what == "train":
        train(Path(where), *rest)
    else:
        disturb(Path(where), int(what), *map(int, rest[:1]), *rest[1:])
