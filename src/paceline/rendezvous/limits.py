"""Why the kernel refuses memory, files or sockets: which limit of this process it is, and how to lift it.

Imports only the standard library.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable

# No room for another file or socket; it may be there again when somebody closes one.
OUT_OF_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_MEMFD = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})


def explain(number: int, call: str = "") -> tuple[str, str]:
    """The likely cause of an error of the kernel and what to do; ("", "") where it is no limit of ours.

    Args:
        number: The errno.
        call: What failed, in the words of the system call.

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


def _closed_file() -> tuple[str, str]:
    return (
        "this process has closed a descriptor that Paceline holds: a program that closes all descriptors "
        "(os.closerange, as to become a daemon) closes those of its libraries, too",
        "close them before the group is formed, or only those that the program has opened itself",
    )


_EXPLANATIONS: dict[int, Callable[[], tuple[str, str]]] = {
    errno.EBADF: _closed_file,
    errno.EMFILE: _open_files,
    errno.ENFILE: _all_open_files,
    errno.EFBIG: _file_size,
    errno.ENOMEM: _address_space,
}
