"""Explains why the kernel refuses memory, files or sockets: which limit was reached, and how to raise it."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable

from paceline.errors import RegionError

# No room for another file or socket; there may be some again when another one is closed.
OUT_OF_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
START_OF_THREAD = "starting a thread"
_MEMFD = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})


def explain(number: int, call: str = "") -> tuple[str, str]:
    """The likely cause of an error of the kernel, and a hint; ("", "") if no known limit is the reason.

    Example:
        explain(errno.EMFILE) with `ulimit -n 1024`: ("the limit of open files and sockets of this process,
        1024, is reached", "`ulimit -n` before the job lifts it ...").
    """
    if number in _MEMFD and call.startswith("memfd_create"):
        return (
            "this kernel, or the seccomp filter of the container, refuses memfd_create",
            "allow memfd_create in the container's seccomp profile (Docker's own does); without it, wrap "
            'models over a process group with reduce_through="group"',
        )
    if number == errno.EAGAIN and call.startswith(START_OF_THREAD):
        return _threads()
    known = _EXPLANATIONS.get(number)
    return ("", "") if known is None else known()


def _open_files() -> tuple[str, str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else hard
    cure = "an administrator (LimitNOFILE, limits.conf)" if hard == soft else f"`ulimit -n {most}` before it"
    return (
        f"the limit of open files and sockets of this process, {soft}, is reached",
        f"{cure} lifts it; or close what the program holds open (DataLoader workers, memory-mapped files)",
    )


def _all_open_files() -> tuple[str, str]:
    return (
        "the whole machine has as many files open as it may",
        "`sysctl fs.file-nr` shows how many; `sysctl -w fs.file-max=...` lifts the limit",
    )


def _file_size() -> tuple[str, str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return (
        f"no file of this process may be longer than {soft} bytes, and shared memory counts as a file",
        "`ulimit -f unlimited` before the job; a service manager calls it LimitFSIZE",
    )


def _address_space() -> tuple[str, str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return "", ""
    return (
        f"this process may use {soft} bytes of addresses, and shared memory is mapped with room to grow",
        "`ulimit -v unlimited` before the job; addresses alone cost no memory",
    )


def _threads() -> tuple[str, str]:
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        return (
            f"this process may use {addresses} bytes of addresses, and each thread needs some for its stack",
            "`ulimit -v unlimited` before the job; addresses alone cost no memory",
        )
    return (
        "this user, or the container or service, has as many processes and threads as it may",
        "`ulimit -u` shows the user's limit, and pids.max of the control group the other one (TasksMax of "
        "systemd, --pids-limit of Docker); fewer DataLoader workers need fewer",
    )


def _missing_file() -> tuple[str, str]:
    if os.path.exists("/proc/self"):
        return "", ""
    return (
        "/proc is not mounted here, by which Paceline and the kernel's own tools know processes",
        "`mount -t proc proc /proc` in this container or chroot; bubblewrap has --proc /proc for it",
    )


def _closed_file() -> tuple[str, str]:
    return (
        "this process has closed a descriptor that Paceline holds: a program that closes all descriptors "
        "(os.closerange, as to become a daemon) closes those of its libraries, too",
        "close them before the group is formed, or only those that the program has opened itself",
    )


_EXPLANATIONS: dict[int, Callable[[], tuple[str, str]]] = {
    errno.EBADF: _closed_file,
    errno.ENOENT: _missing_file,
    errno.EMFILE: _open_files,
    errno.ENFILE: _all_open_files,
    errno.EFBIG: _file_size,
    errno.ENOMEM: _address_space,
}


def start_thread(thread: threading.Thread) -> None:
    """Start a thread that a group needs."""
    try:
        thread.start()
    except RuntimeError as error:  # its text does not say why
        likely, hint = explain(errno.EAGAIN, START_OF_THREAD)
        raise RegionError(
            f"The thread {thread.name!r} could not be started.", seen=str(error), likely=likely, hint=hint
        ) from error
