"""Ranks that are forked from one interpreter that has imported torch, instead of importing it one by one.

Most of a rank's start is torch's own import, some 1.5 s of processor time in each rank. If a script does
nothing before it imports torch, it makes no difference which process has imported it. So one process, the
*template*, imports it, forks all ranks, and ends. The supervisor, a subreaper, then inherits the ranks as its
children. A rank sees what its own Python would show it: arguments, environment, streams, `__main__`.

This file is the supervisor's side; `fork_template.py` runs in the other processes.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.memory_file import write_memory_file
from paceline.launch.process_tree import die_with_parent, kill_descendants, wait_readable
from paceline.launch.rank_process import ForkedRank, RankStart, interpreter

VARIABLE = "PACELINE_FORK_RANKS"
_TEMPLATE = Path(__file__).with_name("fork_template.py")
_IMPORTED_WITHIN_S = 300.0  # a network disk may be slow
_MOST_SOURCE_BYTES = 1 << 20
SHARED = ("torch", "paceline.torch")
BY_OPTIMIZERS = "torch._dynamo"
"""What torch imports for the first optimizer: takes as long as torch itself, and 100 MB in each rank."""


class StoppedError(Exception):
    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True)
class Shared:
    argv: tuple[str, ...]
    modules: tuple[str, ...]


def shared_start(
    argv: Sequence[str], nprocs: int, num_cores: int, inherited: Mapping[str, str]
) -> Shared | None:
    """What one process can import for all ranks of a script; None if each rank must start by itself."""
    if nprocs < 2 or inherited.get(VARIABLE, "1") in ("", "0"):
        return None
    if inherited.get("PACELINE_REPLACE_DDP", "0") not in ("", "0") or sys.flags.interactive:
        return None  # each rank reports what was replaced; or the user wants an interactive session
    modules = modules_before_all(Path(argv[0]))
    if "torch" not in modules or importlib.util.find_spec("torch") is None:
        return None
    # Ranks with a core each import it at the same time, so sharing the import would not make them faster.
    if nprocs > num_cores and makes_optimizers(Path(argv[0])):
        modules += (BY_OPTIMIZERS,)
    return Shared(tuple(argv), modules)


def modules_before_all(script: Path) -> tuple[str, ...]:
    """The modules of `SHARED` that a script imports before anything but imports of the standard library.

    Other statements, above all changes of the environment, may affect these imports.

    Example:
        `import os`, then `import torch`: torch. `os.environ["OMP_NUM_THREADS"] = "1"` between them: nothing.
    """
    found: dict[str, None] = {}
    for number, statement in enumerate(_parsed(script).body):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            # The name may be a module, or an attribute of one.
            names = [f"{statement.module}.{alias.name}" for alias in statement.names]
        elif number == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        else:
            break
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in ("numpy", "torch", "paceline"):
                return tuple(found)
            found |= {each: None for each in SHARED if f"{name}.".startswith(f"{each}.")}
    return tuple(found)


def makes_optimizers(script: Path) -> bool:
    """Whether a script mentions optimizers, and none of the variables that torch reads when it makes the
    first one.
    """
    named = False
    for node in ast.walk(_parsed(script)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("TORCH"):
            return False
        for name in (getattr(node, field, None) for field in ("id", "attr", "name", "module")):
            named = named or (isinstance(name, str) and "optim" in name)
    return named


def _parsed(script: Path) -> ast.Module:
    try:
        if script.stat().st_size <= _MOST_SOURCE_BYTES:
            return ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        pass
    return ast.Module([], [])


def fork_ranks(
    shared: Shared, command: Sequence[str], starts: Sequence[RankStart], wakeup: int
) -> list[ForkedRank] | None:
    """Start all ranks of a script. Call it from the main thread of a subreaper that has no other threads.

    Returns:
        The ranks. None if there are none: torch could not be imported (each rank will then report why), or
        the forked ranks did not become children of this process.
    """
    supervisor = os.getpid()
    reply, written = os.pipe()
    spec = write_memory_file(
        "paceline-ranks", pickle.dumps((shared, list(command), list(starts), supervisor))
    )
    streams = starts[0].streams
    fds = {fd for start in starts for fd in start.all_fds()}

    def prepare_child() -> None:
        die_with_parent(supervisor, signal.SIGKILL)

    try:
        template = subprocess.Popen(
            [*interpreter(), str(_TEMPLATE), *shared.argv],
            env={**starts[0].environment, "PACELINE_TEMPLATE": f"{spec},{written}"},
            stdin=streams.stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            pass_fds=(spec, written, *fds),
            preexec_fn=prepare_child,
        )
    finally:
        os.close(spec)
        os.close(written)
    try:
        pids = _read_pids(reply, wakeup)
    finally:
        os.close(reply)
    if len(pids) == len(starts):
        template.wait()  # it ends at once
        if all(map(_is_child, pids)):
            return [ForkedRank(pid) for pid in pids]
    # Or there is no subreaper here, or a wrapper stands between this process and Python: ranks with another
    # parent than the supervisor have ended themselves.
    kill_descendants()  # a rank that is not returned must not run
    template.returncode = template.returncode or 1  # kill_descendants() has reaped it
    return None


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _read_pids(reply: int, wakeup: int) -> list[int]:
    data = bytearray()
    ends_at = time.monotonic() + _IMPORTED_WITHIN_S
    while (left_s := ends_at - time.monotonic()) > 0:
        ready = wait_readable([reply, wakeup], left_s)
        if wakeup in ready:
            for signum in os.read(wakeup, 512):
                if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    kill_descendants()
                    raise StoppedError(signum)
        if reply in ready:
            piece = os.read(reply, 1 << 16)
            if not piece:
                break
            data += piece
    try:
        return [int(pid) for pid in json.loads(data)]
    except ValueError:
        return []
