"""Runs an example as a user does, and records gradients and parameters in each step of an optimizer.

The head of an example shows the diff against the script with the framework's own wrapper. `beside_own_ddp`
runs both sides of that diff.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# For two processes that import a framework and train for some steps on a busy machine.
WITHIN_S = 400


class Recorded(NamedTuple):
    """The output of a run, and the gradients and parameters of all steps of each rank."""

    printed: str
    gradients: list[np.ndarray]
    parameters: list[np.ndarray]

    def values(self, label: str) -> list[float]:
        """The numbers that are printed after a label."""
        return [float(value) for value in re.findall(rf"{label} (\d+\.\d+)", self.printed)]


def recorded(
    python: str, script: Path, folder: Path, options: Sequence[str], *, num_ranks: int = 2
) -> Recorded:
    """Run a script to its end with `paceline run`."""
    folder.mkdir()
    launcher = [python, "-m", "paceline", "run", "-n", str(num_ranks), "-m", __name__]
    ended = subprocess.run(
        [*launcher, str(folder), str(script), *options],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    files = [np.load(folder / f"{rank}.npz") for rank in range(num_ranks)]
    return Recorded(
        ended.stdout, [file["gradients"] for file in files], [file["parameters"] for file in files]
    )


def beside_own_ddp(python: str, name: str, folder: Path, options: Sequence[str]) -> tuple[Recorded, Recorded]:
    """Run an example, and the script that its head compares it with, on two ranks."""
    own = folder / f"own_{name}"
    own.write_text(_with_own_ddp(EXAMPLES / name))
    ours = recorded(python, EXAMPLES / name, folder / "ours", options)
    return ours, recorded(python, own, folder / "own", options)


def assert_same_bits(*runs: Recorded) -> None:
    """Check that all ranks of all runs have the same gradients and parameters in each step."""
    for run in runs:
        for gradients, parameters in zip(run.gradients, run.parameters):
            np.testing.assert_array_equal(gradients, runs[0].gradients[0])
            np.testing.assert_array_equal(parameters, runs[0].parameters[0])
        assert run.printed == runs[0].printed


def assert_first_gradients_close(run: Recorded, other: Recorded, num_steps: int) -> None:
    """Check that the gradients of the first two steps are the same except for rounding.

    Rounding errors grow in later steps: an optimizer like Adam divides a gradient near zero by its own size.
    """
    mine, others = (each.gradients[0].reshape(num_steps, -1)[:2] for each in (run, other))
    np.testing.assert_allclose(mine, others, rtol=1e-4, atol=1e-5)


def _with_own_ddp(example: Path) -> str:
    """Revert the diff at the head of an example."""
    head, quotes, code = example.read_text().partition('"""\n\n')
    hunks = re.findall(r"((?:^    - .*\n)*)((?:^    \+ .*\n)+)", head, flags=re.MULTILINE)
    for hunk in hunks:
        before, after = (re.sub(r"^    [-+] ", "", lines, flags=re.MULTILINE) for lines in hunk)
        assert code.count(after) == 1, after
        code = code.replace(after, before)
    assert "paceline" not in code
    return head + quotes + code


class _Recorder:
    def __init__(self) -> None:
        self.gradients: list[np.ndarray] = []
        self.parameters: list[np.ndarray] = []

    def record(self, parameters: Sequence[Any]) -> None:
        """Record these parameters and their gradients."""
        self.gradients.append(np.concatenate([each.grad.numpy().ravel() for each in parameters]))
        self.parameters.append(np.concatenate([each.detach().numpy().ravel() for each in parameters]))

    def watch_torch(self) -> None:
        """Record each step of torch's optimizers."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def record(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.record([each for group in optimizer.param_groups for each in group["params"]])

        register_optimizer_step_post_hook(record)

    def watch_paddle(self) -> None:
        """Record each step of the optimizers of Paddle that the examples use."""
        from paddle.optimizer import AdamW, Momentum

        for optimizer_class in (AdamW, Momentum):
            step = optimizer_class.step

            def step_and_record(optimizer: Any, step: Any = step) -> None:
                step(optimizer)
                # Paddle's lists also include the running statistics of batch norms.
                self.record([each for each in optimizer._parameter_list if not each.stop_gradient])

            optimizer_class.step = step_and_record


def _main() -> None:
    folder, script = Path(sys.argv[1]), Path(sys.argv[2])
    recorder = _Recorder()
    is_paddle = "paddle" in script.name
    if is_paddle:
        recorder.watch_paddle()
    else:
        import torch.distributed as dist

        recorder.watch_torch()
        destroy, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(str(script), run_name="__main__")
    np.savez(
        folder / f"{os.environ['RANK']}.npz",
        gradients=np.concatenate(recorder.gradients),
        parameters=np.concatenate(recorder.parameters),
    )
    # All ranks leave together: with the framework's own wrapper, a rank hung forever when another one had
    # destroyed its group.
    while not all((folder / f"{rank}.npz").exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
    if not is_paddle:
        destroy()


if __name__ == "__main__":
    _main()
