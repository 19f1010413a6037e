"""Calls functions with each module that is imported from now on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_watchers: list[Callable[[ModuleType], None]] = []


def watch_imports(function: Callable[[ModuleType], None]) -> None:
    """Call a function with every module that is imported from now on, once the module's code has run.

    A module that is being imported now counts if another function was watching when its import began. An
    exception that the function raises comes out of the import.
    """
    _watchers.append(function)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def unwatch_imports(function: Callable[[ModuleType], None]) -> None:
    if function in _watchers:
        _watchers.remove(function)
    if not _watchers:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _finder]


def import_front_end(module: ModuleType) -> None:
    """Import Paceline's part for a framework after the framework itself; a function for `watch_imports`."""
    name = getattr(module, "__name__", "")
    if name in ("torch", "paddle"):
        importlib.import_module(f"paceline.{name}")


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else ():
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:  # get_code(), which runpy calls, get_data() and others
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # the module's code sees its own loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for function in tuple(_watchers):
            function(module)


_finder = _Finder()
