"""Generated programs in which a signal handler raises on one rank, and the script continues.

make fuzz WHAT=handlers SEEDS=0:100 FRAMEWORK=paddle

The handler runs at a chosen line of Paceline that this rank executes within `backward()` or within
`optimizer.step()`, so a trial is the same in every run. Two results are right: every rank raises, at once; or
all ranks have made the same steps. If the rank has missed a step, every rank must raise. But if it was in the
middle of its backward, the others raise in theirs, once, and all continue with the next step. Before the
first gradient, the exception looks the same as a forward without a backward, and all raise. Some scripts
catch the exception around `backward()` alone, and step. If the other ranks have made that step, this rank
must have the same means, and no rank may raise, unless this one was in a collective call and has given up.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import paceline
from paceline.errors import PacelineError, SkippedPassError
from tests.differential.driver import Check, main, plainly
from tests.differential.programs import Program
from tests.harness import run_ranks
from tests.multiprocess.rank_signals import barrier

FRAMEWORKS = ("torch", "paddle")
ITERATIONS, AT = 8, 4
TIMEOUT_S = 20.0
_SOURCES = str(Path(paceline.__file__).parent)


class TimeUp(Exception):
    """The exception of the handler."""


@contextlib.contextmanager
def raising_at(line: int) -> Iterator[list[str]]:
    """Raise TimeUp before this thread executes the line of Paceline with this number, counted from 0 here.

    Yields the lines that were executed; -1 raises nowhere.
    """
    seen: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_SOURCES):
            return None
        if event == "line":
            seen.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}")
            if len(seen) == line + 1:
                raise TimeUp(seen[-1])
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


# --- the programs ---


def generate(seed: int, framework: str = "torch") -> Program:
    """The program of a seed: the model, the path of its gradients, and the place where the handler raises."""
    random_ = random.Random(seed)
    path = "memory" if framework == "paddle" else random_.choice(["memory"] * 4 + ["group", "hosts"])
    options: dict[str, Any] = {}
    if random_.random() < 0.3:
        options["gradient_as_bucket_view"] = True
    if random_.random() < 0.3:
        options["find_unused_parameters"] = True
    if random_.random() < 0.2 and path == "memory":
        options["check_replicas_every"] = random_.choice([1, 3])
    if random_.random() < 0.2:
        options["weight"] = 2.0
    if random_.random() < 0.15 and framework == "torch":
        options["static_graph"] = True
    has_norm, has_bypass = random_.random() < 0.4, random_.random() < 0.3
    is_sharded = path == "memory" and random_.random() < 0.25
    at, within = random_.choice([0, AT, AT]), random_.choice(["backward"] * 5 + ["step"])
    moments = [random_.random() for _ in range(6 if path == "memory" else 3)]
    catching = random.Random(f"catching {seed}")
    # The others may have left a collective call that follows the means: then all must raise.
    is_plain = not (has_norm or is_sharded or "check_replicas_every" in options)
    may_catch = path == "memory" and is_plain
    catches = may_catch and within == "backward" and catching.random() < 0.6
    return {
        "seed": seed,
        "path": path,
        "catches": catches,
        "options": options,
        "has_norm": has_norm,
        "has_bypass": has_bypass,
        "is_sharded": is_sharded,
        "at": at,
        "within": within,
        "moments": sorted((1 + moment) / 2 if catches else moment for moment in moments),
    }


def show(program: Program) -> str:
    return ", ".join(f"{key}={value}" for key, value in program.items())


class _Torch:
    """The programs in torch."""

    def __init__(self, program: Program, group: Any) -> None:
        import torch
        from torch import nn

        import paceline.torch as front

        torch.manual_seed(0)
        self.program, self.group, self.torch = program, group, torch
        layers = [nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if program["has_norm"] else []), nn.Tanh()]
        self.body = nn.Sequential(*layers, nn.Linear(4, 2))
        self.bypass = nn.Linear(3, 2) if program["has_bypass"] else None
        net = nn.ModuleList([self.body, *([self.bypass] if self.bypass is not None else [])])
        net.forward = self.forward
        options = dict(program["options"])
        if program["path"] == "group":
            options["reduce_through"] = "group"
        self.ddp = front.DistributedDataParallel(net, process_group=group, timeout_s=TIMEOUT_S, **options)
        parameters = list(self.ddp.parameters())
        make = front.ShardedOptimizer if program["is_sharded"] else _plain
        self.optimizer = make(parameters, torch.optim.SGD, lr=0.05, **(_through(group, program)))
        self.parameters = parameters

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        return y if self.bypass is None else y + self.bypass(x)

    def loss(self, rank: int, number: int) -> Any:
        x = self.torch.full((2, 3), 0.1 * (rank + 1) + 0.01 * number)
        x[0, number % 3] += 1.0
        return self.ddp(x).square().mean()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def values(self) -> list[np.ndarray]:
        return [p.detach().numpy() for p in self.parameters]


class _Paddle(_Torch):
    """The programs in Paddle."""

    def __init__(self, program: Program, group: Any) -> None:
        import paddle
        from paddle import nn

        import paceline.paddle as front

        paddle.seed(0)
        self.program, self.group, self.torch = program, group, paddle
        layers = [nn.Linear(3, 4), *([nn.BatchNorm1D(4)] if program["has_norm"] else []), nn.Tanh()]
        self.body = nn.Sequential(*layers, nn.Linear(4, 2))
        self.bypass = nn.Linear(3, 2) if program["has_bypass"] else None
        net = nn.LayerList([self.body, *([self.bypass] if self.bypass is not None else [])])
        net.forward = self.forward
        self.ddp = front.DataParallel(net, group=group, timeout_s=TIMEOUT_S, **program["options"])
        self.parameters = list(self.ddp.parameters())
        if program["is_sharded"]:
            self.optimizer = front.ShardedOptimizer(
                self.parameters, paddle.optimizer.SGD, group, learning_rate=0.05
            )
        else:
            self.optimizer = paddle.optimizer.SGD(0.05, self.parameters)

    def loss(self, rank: int, number: int) -> Any:
        x = np.full((2, 3), 0.1 * (rank + 1) + 0.01 * number, np.float32)
        x[0, number % 3] += 1.0
        return self.ddp(self.torch.to_tensor(x)).square().mean()

    def clear(self) -> None:
        self.optimizer.clear_grad()

    def values(self) -> list[np.ndarray]:
        return [p.numpy() for p in self.parameters]


def _plain(parameters: Any, kind: Any, **options: Any) -> Any:
    options.pop("process_group", None)
    return kind(parameters, **options)


def _through(group: Any, program: Program) -> dict[str, Any]:
    return {"process_group": group} if program["is_sharded"] else {}


# --- one rank ---


def run(group: Any, program: Program, moments: list[float] | None = None) -> list[dict[str, Any]]:
    """The result of each trial on this rank."""
    if isinstance(group, paceline.Group):
        rank, world_size = group.rank, group.world_size
    else:
        import torch.distributed as dist

        rank, world_size = dist.get_rank(), dist.get_world_size()
        if program["path"] == "hosts":
            from tests.several_hosts import be_on_host

            be_on_host(rank)

    def subgroup() -> tuple[Any, Callable[[], None]]:
        if isinstance(group, paceline.Group):
            made = group.subgroup(range(world_size))
            return made, made.close
        made = dist.new_group(range(world_size), timeout=timedelta(seconds=TIMEOUT_S))
        return made, lambda: None

    results = []
    num_lines = 0
    for number, moment in enumerate([-1.0, *(program["moments"] if moments is None else moments)]):
        barrier(f"trial {number}", rank)
        of_trial, close = subgroup()
        subject = (_Paddle if program["framework"] == "paddle" else _Torch)(program, of_trial)
        line = -1 if moment < 0 else int(moment * num_lines)
        result = _trial(subject, program, rank, line if rank == 0 else -1)
        if moment < 0:
            num_lines = result["lines"]
        if result["error"]:  # as if this process had ended
            close()
        results.append(result)
        del subject
    return results


def _trial(subject: Any, program: Program, rank: int, line: int) -> dict[str, Any]:
    result: dict[str, Any] = {"error": "", "hit": "", "steps": 0, "lines": 0, "raised_in": -1, "given_up": []}
    for number in range(ITERATIONS):

        def within(what: str, call: Callable[[], object], number: int = number) -> None:
            if number != program["at"] or what != program["within"]:
                call()
                return
            with raising_at(line) as seen:
                try:
                    call()
                finally:
                    result["lines"] = len(seen)
                    if 0 <= line < len(seen):
                        result["hit"] = seen[line]

        try:
            subject.clear()
            loss = subject.loss(rank, number)
            try:
                within("backward", loss.backward)
            except TimeUp:
                if not program["catches"]:
                    raise
            within("step", subject.optimizer.step)
            result["steps"] += 1
        except TimeUp:
            pass
        except PacelineError as error:
            # A rank that has caught the exception steps with the gradients that it has; it can't continue
            # training.
            if rank and not program["catches"] and isinstance(error, SkippedPassError):
                result["given_up"].append(number)
                continue
            result["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            result["raised_in"] = number
            break
        except Exception:  # from Paddle, whose kernels hide the exception of a hook
            if not result["hit"] or program["framework"] != "paddle":
                raise
    with contextlib.suppress(PacelineError):
        result["digest"] = _digest(subject.values())
    return result


def _digest(values: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(value).tobytes() for value in values)).hexdigest()


# --- the judgement ---


def judge(results: list[list[dict[str, Any]]], program: Program) -> list[str]:
    """The failures in the trials of all ranks, in words."""
    found = []
    for number, trial in enumerate(zip(*results, strict=True)):
        hit = next((each["hit"] for each in trial if each["hit"]), "") or "no moment"
        errors = [each["error"] for each in trial]
        if any(errors) and not all(errors):
            found.append(f"trial {number}, at {hit}: some ranks raised, and others did not: {errors}")
        elif not any(errors) and len({each["digest"] for each in trial}) > 1:
            steps = [each["steps"] for each in trial]
            found.append(f"trial {number}, at {hit}: replicas differ, and no rank raised; steps {steps}")
        given_up = [each["given_up"] for each in trial[1:]]
        if any(given_up) and any(each != [program["at"]] for each in given_up):
            found.append(f"trial {number}, at {hit}: iterations that ranks report as skipped: {given_up}")
        gave_up = all(error.startswith("PeerLostError") for error in errors)  # within a collective call
        had_means = max(each["steps"] for each in trial[1:]) > program["at"]
        if program["catches"] and any(errors) and had_means and not gave_up:
            found.append(f"trial {number}, at {hit}: the others had the means, and all raised: {errors}")
        late = [each["raised_in"] for each in trial if each["raised_in"] > AT + 2]
        if late:
            found.append(f"trial {number}, at {hit}: raised in iteration {late[0]} only: {errors}")
    return found


def check(program: Program, framework: str = "torch", moments: list[float] | None = None) -> str:
    """The failures, in words; empty: none."""
    group = "paceline" if program["path"] == "memory" else "gloo"
    facts = {"program": {**program, "framework": framework}, "moments": moments}
    results = run_ranks(run, 2, facts, group=group, framework=framework, deadline_s=600)
    return "\n".join(judge(results, program))


def checking(framework: str) -> contextlib.AbstractContextManager[Check]:
    return plainly(check, framework)


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
