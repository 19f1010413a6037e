"""Simulates a kernel, or a container, that refuses a system call: a real seccomp filter on this process."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

# The system call numbers, and seccomp's name of the machine (linux/audit.h).
_ARCHITECTURES = {
    "x86_64": (
        0xC000003E,
        {
            "set_robust_list": 273,
            "get_robust_list": 274,
            "fallocate": 285,
            "process_vm_readv": 310,
            "memfd_create": 319,
            "pidfd_open": 434,
            "clone3": 435,  # for threads; a fork is clone()
            "futex_waitv": 449,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "fallocate": 47,
            "set_robust_list": 99,
            "get_robust_list": 100,
            "process_vm_readv": 270,
            "memfd_create": 279,
            "pidfd_open": 434,
            "clone3": 435,  # for threads; a fork is clone()
            "futex_waitv": 449,
        },
    ),
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # in struct seccomp_data


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def is_supported() -> bool:
    """True if the numbers of this machine are listed here."""
    return platform.machine() in _ARCHITECTURES


def refuse(call: str, error: int = errno.ENOSYS) -> None:
    """Make the system call `call` fail with `error` in this process and in processes that it starts."""
    architecture, numbers = _ARCHITECTURES[platform.machine()]
    code = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD, 0, 0, _ARCHITECTURE_AT),
            (_JUMP_IF_EQUAL, 0, 3, architecture),
            (_LOAD, 0, 0, _NUMBER_AT),
            (_JUMP_IF_EQUAL, 0, 1, numbers[call]),
            (_RETURN, 0, 0, _ERRNO | error),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
