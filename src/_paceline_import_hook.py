"""Something to do after a module has been imported; and what `paceline.pth` does when Python starts.

A module of its own beside the package, of the standard library alone: it runs at the start of every Python
process in which PACELINE_REPLACE_DDP is set, before the program, which may still want to set variables that
numpy or torch read when they are imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "PACELINE_REPLACE_DDP"


class AfterImport:
    """Calls a function with every module that is imported from `install()` on, once its code has run.

    Args:
        function: Gets the module. An exception that it raises comes out of the import.
        names: Only for these modules; None: for all.
    """

    def __init__(self, function: Callable[[ModuleType], None], names: frozenset[str] | None = None) -> None:
        self._function = function
        self._names = names

    def install(self) -> None:
        """Begin; see `remove`."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """End it."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The import system's call: what the next finders find, with a loader that calls the function."""
        if self._names is not None and name not in self._names:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else ():
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self._function)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Another loader, and a call of a function afterwards."""

    def __init__(self, loader: Any, function: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._function = function

    def __getattr__(self, name: str) -> Any:  # get_code(), which runpy calls, get_data() and others
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # as if nobody had looked on
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._function(module)


def at_start() -> None:
    """Let the first import of torch or paddle bring in Paceline's part for it, which reads the variable."""
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return
    frameworks = frozenset({"torch", "paddle"})
    AfterImport(lambda module: _import_front_end(module.__name__), frameworks).install()


def _import_front_end(framework: str) -> None:
    importlib.import_module(f"paceline.{framework}")
