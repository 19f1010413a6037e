"""Pickles the call that `spawn` makes in its ranks.

Functions that can be found by name are pickled as multiprocessing does it. cloudpickle is used for others:
those defined in a notebook, a REPL, or inside another function. The bytes are passed in an anonymous memory
file that only our own children inherit; no network is involved.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

from paceline.errors import ConfigError
from paceline.launch.notebook_cells import remember_sources, typed_sources


@dataclass
class InheritedFd:
    """multiprocessing calls `detach`."""

    fd: int

    def detach(self) -> int:
        return self.fd


@dataclass
class _Inheritance:
    fds: list[int] = field(default_factory=list)
    DupFd = InheritedFd

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return fd


@dataclass(frozen=True)
class PickledCall:
    data: bytes
    fds: tuple[int, ...]  # descriptors that the other process must inherit


def pack(function: Callable[..., Any], args: tuple[Any, ...]) -> PickledCall:
    """Pickle a call.

    Args:
        function: What to call.
        args: Its arguments after the rank. Queues and locks of multiprocessing's "spawn" context, and tensors
            if torch is loaded, are shared; anything else is copied.
    """
    preparation = _preparation()
    inheritance = _Inheritance()
    set_spawning_popen(inheritance)  # type: ignore[arg-type]
    try:
        is_main_importable = any(name.startswith("init_main_") for name in preparation)
        call = _pickle_call(function, args, is_main_importable=is_main_importable)
    finally:
        set_spawning_popen(None)
    first = pickle.dumps((preparation, _tracker_fd(), typed_sources()))
    return PickledCall(first + call, tuple(inheritance.fds) + _tracker_fds())


def unpack(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Unpickle a call. Imports the parent's main script first, as `__mp_main__`, so that its names exist."""
    from multiprocessing import resource_tracker, spawn

    stream = io.BytesIO(data)
    preparation, tracker_fd, sources = pickle.load(stream)
    remember_sources(sources)
    if tracker_fd is not None:
        # As in multiprocessing: one tracker for the whole family, otherwise ours would unlink what other
        # processes still use.
        resource_tracker._resource_tracker._fd = tracker_fd  # type: ignore[attr-defined]
    spawn.prepare(preparation)
    function, args = pickle.load(stream)
    return function, args


def _preparation() -> dict[str, Any]:
    main = sys.modules["__main__"]
    preparation: dict[str, Any] = {
        "sys_path": [os.getcwd() if entry == "" else entry for entry in sys.path],
        "sys_argv": sys.argv,
        "authkey": bytes(multiprocessing.current_process().authkey),
    }
    name = getattr(getattr(main, "__spec__", None), "name", None)
    path = getattr(main, "__file__", None)
    if name is not None:
        preparation["init_main_from_name"] = name
    elif path is not None and os.path.exists(path):
        preparation["init_main_from_path"] = os.path.abspath(path)
    return preparation


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...], *, is_main_importable: bool) -> bytes:
    reason: Exception | None = None
    if is_main_importable or not _has_cloudpickle():
        try:
            data = bytes(ForkingPickler.dumps((function, args)))
            if is_main_importable or b"__main__" not in data:
                return data
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            reason = error
    if not _has_cloudpickle():
        raise _not_portable(function, reason)
    return _cloudpickle_call(function, args)


def _cloudpickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import cloudpickle

    def reduce_code(code: types.CodeType) -> tuple[Any, ...]:
        make, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
        return _code_from, (make, parts, code.co_filename)

    # The table must belong to the class: the pickler reads it only when it is created.
    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar = ChainMap(
            {types.CodeType: reduce_code},
            ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
            cloudpickle.Pickler.dispatch_table,
        )

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump((function, args))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{_name(function)} or an argument of it cannot be sent to another process.",
            got=f"{type(error).__name__}: {error}",
            hint="create locks, files and connections inside the function; "
            'queues and locks come from multiprocessing.get_context("spawn")',
        ) from error
    return buffer.getvalue()


def _code_from(make: Callable[..., types.CodeType], parts: tuple[Any, ...], filename: str) -> types.CodeType:
    """Code from cloudpickle, which since 3.1.3 drops the file name: tracebacks need it to show the cell."""
    return make(*parts).replace(co_filename=filename)


def _has_cloudpickle() -> bool:
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        return False
    return True


def _not_portable(function: Callable[..., Any], reason: Exception | None) -> ConfigError:
    return ConfigError(
        f"{_name(function)}, or an argument of it, cannot be found by name from another process.",
        got=f"{type(reason).__name__}: {reason}" if reason else "defined in a notebook or a REPL",
        hint="`pip install cloudpickle`, or define it at the top of a module",
        function=_name(function),
    )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _tracker_fd() -> int | None:
    if "multiprocessing.resource_tracker" not in sys.modules:
        return None
    from multiprocessing import resource_tracker

    fd: int | None = resource_tracker.getfd()
    return fd


def _tracker_fds() -> tuple[int, ...]:
    fd = _tracker_fd()
    return () if fd is None else (fd,)
