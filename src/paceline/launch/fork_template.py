"""Imports torch once, and becomes all ranks of a script by fork; see `forked`.

The supervisor runs it as a program. After the fork, each rank resets everything that would differ in a Python
of its own, except the modules that this process has imported: they do no harm.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import pickle
import signal
import sys
import time
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

_LOOK_S = 0.001
_path = list(sys.path)  # the first entry is this file's folder, where Python would put the script's


def main() -> None:
    root = str(Path(__file__).resolve().parents[2])
    sys.path[:] = [*_path[1:], root]
    from paceline.launch.memory_file import read_memory_file

    spec, reply = map(int, os.environ["PACELINE_TEMPLATE"].split(","))
    shared, command, starts, supervisor = pickle.loads(read_memory_file(spec))
    gc.disable()  # imports create 250,000 objects and almost no garbage
    try:
        for name in shared.modules:
            importlib.import_module(name)
    except Exception:
        os._exit(1)  # each rank will import by itself, and report the error
    gc.freeze()  # otherwise a collection in a rank would write to memory that it shares with the others
    gc.enable()
    template, pids = os.getpid(), []
    gate, held = os.pipe()  # reading blocks until the template ends: then no process holds the other end
    for number in range(len(starts)):
        pid = os.fork()
        if pid == 0:
            for fd in (spec, reply, held):
                os.close(fd)
            os.read(gate, 1)  # so that ranks keep no core busy by polling whether all have been forked
            os.close(gate)
            _become(starts, number, template, supervisor)
            _run(shared.argv, command)
            return
        pids.append(pid)
    os.write(reply, json.dumps(pids).encode())
    os._exit(0)


def _become(starts: Sequence[Any], number: int, template: int, supervisor: int) -> None:
    own = starts[number]
    while (parent := os.getppid()) == template:  # it is ending, but the kernel has not moved its children yet
        time.sleep(_LOOK_S)
    if parent != supervisor:
        os.kill(os.getpid(), signal.SIGKILL)
    own.prepare(supervisor)
    own.streams.take()
    kept = {0, 1, 2, *own.inherited_fds}
    for fd in {fd for start in starts for fd in start.all_fds()} - kept:
        os.close(fd)
    os.environ.clear()
    os.environ.update(own.environment)
    # Generators without a seed must differ between ranks; `random` reseeds itself after a fork.
    sys.modules["torch"].default_generator.seed()
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()


def _run(argv: Sequence[str], command: Sequence[str]) -> None:
    script = os.path.abspath(argv[0])
    sys.argv[:], sys.orig_argv[:] = argv, command
    # Python puts the script's folder first, unless it was started with -P.
    folder = [] if getattr(sys.flags, "safe_path", False) else [os.path.dirname(os.path.realpath(script))]
    sys.path[:] = [*folder, *(_path if getattr(sys.flags, "safe_path", False) else _path[1:])]
    sys.path_importer_cache.clear()
    module = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", script)
    vars(module).update(__file__=script, __loader__=loader, __builtins__=__builtins__, __cached__=None)
    _kept.append(sys.modules["__main__"])
    sys.modules["__main__"] = module
    try:
        with io.open_code(script) as file:
            code = compile(file.read(), script, "exec", dont_inherit=True)
        exec(code, vars(module))
    except BaseException:
        _hide_own_frames()
        raise


_kept: list[types.ModuleType] = []
"""Keeps this module alive, whose functions run, although another one is `__main__` now."""


def _hide_own_frames() -> None:
    """Make the traceback of an exception that ends the program begin in the script, as without us."""
    show = sys.excepthook

    def show_without_ours(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        with contextlib.suppress(AttributeError):
            error.__traceback__ = trace
        show(kind, error, trace)

    sys.excepthook = show_without_ours


if __name__ == "__main__":
    main()
