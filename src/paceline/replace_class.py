"""Replaces a framework's class by Paceline's, in every module that has bound it or imports it later.

A library that runs `from torch.nn.parallel import DistributedDataParallel` binds the class to a name of its
own. An assignment to `torch.nn.parallel` does not change that name, and gives no error. So all loaded modules
are searched for the class, and an import hook searches those that are imported later. The module that defines
the class stays as it is, because Paceline's class has it as a base.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from paceline.env import read_rank_environment
from paceline.errors import ConfigError
from paceline.import_hook import unwatch_imports, watch_imports

VARIABLE = "PACELINE_REPLACE_DDP"
"""`paceline run --replace-ddp` sets it for the ranks, to 1 or to SAMPLER."""
SAMPLER = "sampler"


@dataclass(frozen=True)
class Pair:
    """One class and its replacement.

    Attributes:
        name: The name that users know: "torch.nn.parallel.DistributedDataParallel".
        original: The class, from the module that defines it.
        ours: The class that replaces it.
        is_wrapper: Whether it wraps models. A warning reports if it never did.
    """

    name: str
    original: type
    ours: type
    is_wrapper: bool = True


class Replacement:
    """Classes that are replaced until `undo()`, which also runs at the end of a `with` block.

    Attributes:
        places: Where a class was replaced so far, as "module.name".
        wrapped: Number of models that our classes have wrapped since.

    Example:
        >>> with paceline.torch.replace_ddp() as replaced:
        ...     trainer.fit(model)          # wraps the model in its own way
        >>> replaced.wrapped
        1
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        for pair in pairs:
            _check_is_original(pair)
        self.pairs = tuple(pairs)
        self.wrapped = 0
        self._was_announced = False
        self._bound: list[tuple[ModuleType, str, type]] = []
        self._ours = {id(pair.original): pair.ours for pair in pairs}
        self._kept = {pair.original.__module__ for pair in pairs}
        self._inits = [(pair.ours, vars(pair.ours)["__init__"]) for pair in pairs if pair.is_wrapper]
        for ours, init in self._inits:
            self._count_calls(ours, init)
        for module in list(sys.modules.values()):
            self._replace_in(module)
        watch_imports(self._replace_in)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    @property
    def places(self) -> list[str]:
        return [f"{module.__name__}.{name}" for module, name, _ in self._bound]

    def undo(self) -> None:
        """Put the original classes back. Models that are wrapped stay so."""
        unwatch_imports(self._replace_in)
        for module, name, original in self._bound:
            if id(original) in self._ours and vars(module).get(name) is self._ours[id(original)]:
                setattr(module, name, original)
        for ours, init in self._inits:
            type.__setattr__(ours, "__init__", init)
        self._bound, self._inits = [], []
        _active.pop(self.pairs, None)

    def announce(self) -> None:
        """Print on rank 0 what was replaced, and at the end of the process a warning if no model was wrapped.

        If no launcher has given ranks, and the variable asked for the replacement, this is printed when the
        first model is wrapped. Until then, the process may be torch's elastic agent (`paceline run
        --nnodes`), which wraps nothing.
        """
        rank = _rank()
        if rank is None and not asked_by_environment()[0]:
            rank = 0 if _may_be_first_rank() else None
        if rank == 0:
            self._say_what()
            atexit.register(self._say_if_for_nothing, os.getpid())
        self._was_announced = rank is not None

    def _say_what(self) -> None:
        names = ", ".join(pair.name for pair in self.pairs)
        print(f"paceline: replaced {names}, bound in {_modules(self._bound)}.", file=sys.stderr)
        for name in _foreign_subclasses(self.pairs):
            print(
                f"paceline: {name} is a subclass that was made before; what it wraps stays the framework's.",
                file=sys.stderr,
            )

    def _say_if_for_nothing(self, pid: int) -> None:
        if self.wrapped or not self._inits or os.getpid() != pid or not _is_main_process():
            return
        names = " or ".join(pair.name for pair in self.pairs if pair.is_wrapper)
        likely = "the script wraps no model, or a library wraps it in a class of its own"
        hint = "wrap the model in Paceline's class yourself"
        subclasses = ", ".join(_foreign_subclasses(self.pairs))
        if subclasses:
            likely = f"a model was wrapped in a subclass of the framework's class: {subclasses}"
        main = sys.modules.get("__main__")
        for pair in self.pairs:  # modules are searched once they have run; the main script has not by then
            if any(value is pair.original for value in vars(main).values()):
                defined_in = pair.original.__module__
                likely = (
                    f"the script imports {pair.original.__name__} from {defined_in}, which is not changed"
                )
                hint = f"import it from {pair.name.rpartition('.')[0]}"
        print(
            f"paceline: warning: no model was wrapped in what replaced {names}.\n"
            f"  likely   {likely}\n  hint     {hint}",
            file=sys.stderr,
        )

    def _replace_in(self, module: ModuleType) -> None:
        bound = getattr(module, "__dict__", None)
        own = getattr(module, "__name__", "")
        if not isinstance(bound, dict) or not isinstance(own, str):
            return
        if own in self._kept or own.partition(".")[0] == "paceline":
            return
        for name, value in list(bound.items()):
            ours = self._ours.get(id(value))
            if ours is not None:
                bound[name] = ours
                self._bound.append((module, name, value))

    def _count_calls(self, ours: type, init: Any) -> None:
        @functools.wraps(init)
        def counted(model: Any, *args: Any, **kwargs: Any) -> None:
            init(model, *args, **kwargs)
            self.wrapped += 1
            if not self._was_announced:
                self._was_announced = True
                if _may_be_first_rank():
                    self._say_what()

        type.__setattr__(ours, "__init__", counted)


_active: dict[tuple[Pair, ...], Replacement] = {}


def replace(pairs: Sequence[Pair]) -> Replacement:
    """Replace classes. The same pairs are replaced only once: a second call returns the same replacement."""
    key = tuple(pairs)
    if key not in _active:
        _active[key] = Replacement(key)
        _active[key].announce()
    return _active[key]


def replace_if_asked(replace_ddp: Callable[..., Replacement]) -> None:
    wrappers, samplers = asked_by_environment()
    if wrappers:
        replace_ddp(samplers=samplers)


def asked_by_environment() -> tuple[bool, bool]:
    value = os.environ.get(VARIABLE, "")
    check_value(VARIABLE, value or "0")
    return value not in ("", "0"), value == SAMPLER


def check_value(name: str, value: str) -> None:
    if value not in ("0", "1", SAMPLER):
        raise ConfigError(
            f"{name}={value} is not usable.",
            expected=f"1 (replace the wrappers), or {SAMPLER} (the samplers, too); 0 replaces nothing",
            got=repr(value),
            hint=f"{name}=1",
        )


def _check_is_original(pair: Pair) -> None:
    module, _, name = pair.name.rpartition(".")
    bound = getattr(sys.modules.get(module), name, None)
    if bound is pair.original:
        return
    if bound is pair.ours:
        raise ConfigError(
            f"{pair.name} is replaced already, together with other classes.",
            hint="undo() the first replacement before another one is made",
        )
    raise ConfigError(
        f"{pair.name} is not the framework's own class, so it is not replaced.",
        seen=f"{getattr(bound, '__module__', '?')}.{getattr(bound, '__qualname__', bound)}",
        likely="another library has replaced it",
        hint="replace it once, by one of them",
    )


def _foreign_subclasses(pairs: Sequence[Pair]) -> Iterator[str]:
    for pair in pairs:
        subclasses: list[type] = pair.original.__subclasses__()
        for each in subclasses:
            framework = pair.original.__module__.partition(".")[0]
            if each is not pair.ours and each.__module__.partition(".")[0] not in ("paceline", framework):
                yield f"{each.__module__}.{each.__qualname__}"


def _modules(bound: Sequence[tuple[ModuleType, str, type]]) -> str:
    names = sorted({module.__name__ for module, _, _ in bound})
    return f"{len(names)} modules" if len(names) != 1 else names[0]


def _rank() -> int | None:
    """This process's rank; None if no launcher has given one."""
    with contextlib.suppress(ConfigError):
        return read_rank_environment(needs_address=False).rank
    return None


def _may_be_first_rank() -> bool:
    """Whether this process is rank 0, or becomes it as far as is known.

    Lightning's own launcher, for example, sets no variable in the process that becomes rank 0, and LOCAL_RANK
    in those that it starts. Workers of multiprocessing do not know their rank until they join a group.
    """
    rank = _rank()
    if rank is not None:
        return rank == 0
    return os.environ.get("LOCAL_RANK", "0") == "0" and _is_main_process()


def _is_main_process() -> bool:
    # Looked up and not imported, because an import would delay the start of every `paceline run`.
    processes = sys.modules.get("multiprocessing.process")
    return processes is None or processes.parent_process() is None
