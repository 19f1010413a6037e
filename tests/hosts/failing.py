"""Trains until something goes wrong, and reports when and what: `failing.py FRAMEWORK WHAT PATH`.

Rank 3 kills itself if WHAT is "kill", and raises if it is "raise". Other faults come from the test, or exist
from the start, like a slow link. PATH is a value of `reduce_through`, or "local_sgd", or "torch" for torch's
own DDP. Each rank prints lines of an event and its time, by a clock that all hosts share. The line after
"warm" is the rank's process id, and the lines after "noticed" are its error.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback

from paceline.errors import PacelineError

GUILTY = 3
WARM_STEPS = 3
SLOW_WIDTH = 380
"""The width of a model whose gradients, 0.6 MB, wait in the queue of a link of 1 Mbit/s for 4.6 s."""
PAUSED_STEPS = 400
"""Steps that take at least 4 s, in which the test pauses a rank or cuts a link for a while."""
NOTICED = 7
"""Exit status of a rank that raised because of a failure elsewhere."""


def say(event: str, text: str = "") -> None:
    print(f"{event} {time.monotonic():.3f}\n{text}", end="", flush=True)


def main() -> None:
    framework, what, path = sys.argv[1:]
    program = importlib.import_module(f"tests.hosts.in_{framework}")
    rank = program.join(what == "the framework forms the group")
    backward = program.backward_of(path, SLOW_WIDTH) if what == "slow" else program.backward_of(path)
    steps = {"pause": PAUSED_STEPS, "slow": WARM_STEPS + 1}.get(what)
    failure = RuntimeError if path == "torch" else PacelineError  # the only type that torch raises
    step = 0
    try:
        while step != steps:
            backward()
            time.sleep(0.01)
            step += 1
            if step == WARM_STEPS:
                say("warm", f"{os.getpid()}\n")
            if step == 2 * WARM_STEPS and rank == GUILTY:
                if what == "kill":
                    say("guilty")
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "raise":
                    say("guilty")
                    raise ValueError("the cause")
    except failure as error:
        say("noticed", f"{error}\n")
        shown = "".join(traceback.format_exception(error))
        assert path == "torch" or '{"kind"' not in shown, shown  # a packed error of another rank
        if path == "torch":
            program.end_at_once(NOTICED)
        sys.exit(NOTICED)
    say("done")
    program.leave()


if __name__ == "__main__":
    main()
