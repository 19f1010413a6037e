"""A Python that starts in milliseconds with a framework imported, for programs that start other programs.

`python -m benchmarks` starts many processes, each of which imports torch: some seconds of a core every time,
which is most of the cost of such a test. `warm_python("torch")` is the path of a program that takes the
command line of a Python and does the same as that Python, in a fork of a process that has imported the
framework. It sets `sys.executable` to itself, so that processes started by the program are warm as well.

The program at the path (`_CLIENT`) sends its command line, environment, folder and open files to the process
that forks (`_serve`). It passes on the signals that it gets, and ends as the fork ends; if it is killed, so
is the fork. The fork enters the program's namespaces, of which hosts are made (`tests.hosts.namespaces`).

Do not use it for tests of which process starts, signals or outlives which, unless they ask the fork for its
process id: there are two processes where Python has one. Nor for tests of the very end of a process, which a
fork skips, or of programs for which multiprocessing spawns processes: those import everything anew.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import functools
import json
import multiprocessing
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

from tests.harness import server
from tests.harness.rank_main import die_with

_PATIENCE_S = 120.0  # for the import, on a busy machine
# The namespaces that make a host: its name, its network, and its mounts. The mounts come last because the
# others are found under /proc.
_NAMESPACES = ("uts", "net", "mnt")

_CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys

with socket.socket(socket.AF_UNIX) as server:
    server.settimeout({patience_s})
    server.connect({address!r})
    fds = [int(name) for name in os.listdir("/proc/self/fd")]
    fds = [fd for fd in fds if fd != server.fileno() and os.path.exists(f"/proc/self/fd/{{fd}}")]
    said = {{"arguments": sys.argv, "environ": dict(os.environ), "folder": os.getcwd(), "fds": fds}}
    message = json.dumps(said).encode()
    lifeline, kept = os.pipe()  # closed with this process, however it ends
    own = [os.open(f"/proc/self/ns/{{name}}", os.O_RDONLY) for name in {namespaces}]
    head = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lifeline, *own, *fds]))]
    server.sendmsg([len(message).to_bytes(8, "big")], head)
    server.sendall(message)
    pid = int.from_bytes(server.recv(8), "big")
    server.settimeout(None)

    def forward(number, _):
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has just ended, as this process is about to
            pass

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    ended = server.recv(8)
status = int.from_bytes(ended, "big", signed=True) if ended else -signal.SIGKILL
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def warm_python(framework: str) -> str:
    """The path of a Python with `framework` ("torch" or "paddle") imported. Valid until this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    address = os.path.join(folder.name, "server")
    context = server.context()
    ready, started = context.Pipe(duplex=False)
    theirs, ours = context.Pipe(duplex=False)
    with server.starting_from(framework):
        process = context.Process(target=_serve, args=(address, started, theirs), daemon=False)
        process.start()
    started.close()
    theirs.close()
    if not ready.poll(_PATIENCE_S):
        raise RuntimeError(f"no Python with {framework} imported after {_PATIENCE_S:g} s")
    ready.recv()
    path = Path(folder.name) / "python"
    path.write_text(
        _CLIENT.format(python=sys.executable, address=address, patience_s=_PATIENCE_S, namespaces=_NAMESPACES)
    )
    path.chmod(0o700)
    atexit.register(lambda: (ours.close(), process.join(5.0), folder.cleanup()))
    return str(path)


def _serve(address: str, started: Any, lifeline: Any) -> None:
    """Forks a process for each program that connects, and sends it the exit status of the fork."""
    os.setsid()
    die_with(lifeline.fileno())
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        started.send(None)
        running: dict[int, socket.socket] = {}
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                    _send_statuses(running)
                    continue
                connection, _ = listener.accept()
                pid = os.fork()
                if pid == 0:
                    _become(connection, (listener, woken, wake, *running.values()))
                running[pid] = connection


def _send_statuses(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as connection, contextlib.suppress(OSError):
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))


def _become(connection: socket.socket, of_server: tuple[socket.socket, ...]) -> NoReturn:
    """Do the work of the Python that a program requested."""
    status = 1
    try:
        multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # as in a Python of its own
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in of_server:
            each.close()
        said = _take_over(connection)
        try:
            _run(*said)
            status = 0
        except SystemExit as ended:
            status = _status_of(ended.code)
        except BaseException as error:
            trace = _trace_of_program(error.__traceback__)
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as a Python that ends
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    except BaseException:  # our own PYTHONPATH, which shows where the tests are
        traceback.print_exc()
    finally:
        os._exit(status)


def _take_over(connection: socket.socket) -> tuple[str, list[str]]:
    """Receive the files, folder and environment of the program; return its own path and its arguments."""
    head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(4 * 250))
    message = b""
    while len(message) < int.from_bytes(head, "big"):
        message += connection.recv(1 << 16)
    said = json.loads(message)
    got = array.array("i")
    for _, _, data in ancillary:
        got.frombytes(data)
    connection.sendall(os.getpid().to_bytes(8, "big"))
    connection.close()
    os.setsid()
    # Above all numbers that the program uses, so that no descriptor is overwritten before it has been moved.
    above = max(said["fds"]) + 1
    lifeline, *moved = (_move(fd, above) for fd in got)
    die_with(lifeline, is_group=True)
    for name in _NAMESPACES:
        _enter(name, moved.pop(0))
    for fd, number in zip(moved, said["fds"], strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    if 0 in said["fds"]:  # multiprocessing closes stdin in its processes
        sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(said["folder"])
    os.environ.clear()
    os.environ.update(said["environ"])
    # Forks of `paceline run` must be its own children; and here each rank has the framework already.
    os.environ.setdefault("PACELINE_FORK_RANKS", "0")
    tempfile.tempdir = None
    path, *arguments = said["arguments"]
    sys.executable = path
    return path, arguments


def _move(fd: int, above: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(fd)
    return moved


def _enter(name: str, fd: int) -> None:
    """Move this process into a namespace, unless it is in it."""
    if os.fstat(fd).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino and ctypes.CDLL(None).setns(fd, 0):
        raise OSError(f"cannot enter the program's {name} namespace")
    os.close(fd)


def _run(path: str, arguments: list[str]) -> None:
    """Do what `python arguments` does, for the options that the tests use."""
    options = []
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-m", "-c", "-"):
        option = arguments.pop(0)
        options.append(option)
        if option in ("-W", "-X"):
            arguments.pop(0)
    if "-u" in options or os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    kind = arguments.pop(0)
    if kind == "-m":
        sys.argv = arguments
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [kind, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        runpy.run_path(kind, run_name="__main__")


def _trace_of_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Without the frames that a Python of its own does not have: those of this file, and of runpy."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (
        __file__,
        "<frozen runpy>",
        runpy.__file__,
    ):
        trace = trace.tb_next
    return trace


def _status_of(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
