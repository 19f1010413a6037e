"""Something to do around the import of a module; and what `paceline.pth` does when Python starts.

A module of its own beside the package, of the standard library alone: it runs at the start of every Python
process in which PACELINE_REPLACE_DDP or PACELINE_FREEZE_IMPORTS is set, before the program, which may still
want to set variables that numpy or torch read when they are imported.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "PACELINE_REPLACE_DDP"
FREEZE_VARIABLE = "PACELINE_FREEZE_IMPORTS"
_FROZEN = frozenset({"torch", "paddle", "paceline.torch", "paceline.paddle"})

# Gets the loader that was found, and the module, whose code it has to run.
Execute = Callable[[Any, ModuleType], None]

_watchers: list[Callable[[ModuleType], None]] = []


def watch_imports(function: Callable[[ModuleType], None]) -> None:
    """Call a function with every module that is imported from now on, once the module's code has run.

    A module that is being imported now counts if somebody was watching when its import began. An exception
    that the function raises comes out of the import.
    """
    _watchers.append(function)
    if _watching not in sys.meta_path:
        sys.meta_path.insert(0, _watching)


def unwatch_imports(function: Callable[[ModuleType], None]) -> None:
    """End what `watch_imports` began; nothing happens if it has ended."""
    if function in _watchers:
        _watchers.remove(function)
    if not _watchers:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _watching]


class _Finder:
    """Finds what the finders behind it find, with a loader that runs modules in another way.

    Args:
        execute: What runs a module.
        names: Only for these modules; None: for all.
    """

    def __init__(self, execute: Execute, names: frozenset[str] | None = None) -> None:
        self._execute = execute
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The import system's call."""
        if self._names is not None and name not in self._names:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else ():
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self._execute)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Another loader, whose modules run in another way."""

    def __init__(self, loader: Any, execute: Execute) -> None:
        self._loader = loader
        self._execute = execute

    def __getattr__(self, name: str) -> Any:  # get_code(), which runpy calls, get_data() and others
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # as if nobody had looked on
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._execute(self._loader, module)


def _then_watchers(loader: Any, module: ModuleType) -> None:
    loader.exec_module(module)
    for function in tuple(_watchers):
        function(module)


_watching = _Finder(_then_watchers)


def at_start() -> None:
    """Do what the variables ask for when a framework is imported.

    PACELINE_FREEZE_IMPORTS, which `paceline run` sets: import torch, paddle and Paceline's parts for them
    without garbage collections. There is next to no garbage then, but more than 250,000 objects, which each
    collection would look at again, the last ones when the process ends.

    PACELINE_REPLACE_DDP: let the first import of torch or paddle bring in Paceline's part for it, which reads
    the variable. All modules are watched from here on, not those two alone: the library that imports torch
    first may bind a class of torch's after that import, and is looked through when its own import is
    complete.
    """
    if os.environ.get(FREEZE_VARIABLE, "0") not in ("", "0"):
        sys.meta_path.insert(0, _Finder(_without_collections, _FROZEN))
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        watch_imports(_import_front_end)


def _without_collections(loader: Any, module: ModuleType) -> None:
    if not gc.isenabled():  # an import within an import, or what the program wants
        loader.exec_module(module)
        return
    gc.disable()
    try:
        loader.exec_module(module)
    finally:
        gc.enable()
    gc.freeze()


def _import_front_end(module: ModuleType) -> None:
    name = getattr(module, "__name__", "")
    if name in ("torch", "paddle"):
        importlib.import_module(f"paceline.{name}")
