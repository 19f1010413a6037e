"""`paceline plan model.py -n 64`: `plan_memory` of a model in a file, as a table.

Imports its neighbours, and what is below the front ends.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from paceline.bench.units import format_size
from paceline.errors import ConfigError
from paceline.sharding.memory import MemoryPlan
from paceline.torch.one_model.memory_plan import plan_memory

_FUNCTION = "make_model"
_COLUMNS = ("way", "parameters", "gradients", "optimizer", "each host", "of torch DDP's")
_NOTES = """\
Gradients: after a step, at most, with the memory where they are averaged. Not counted: activations, and what
a process takes before there is a model (Python and torch). Bucket view: gradient_as_bucket_view=True; one
model: share_parameters=True; scatter: reduce="scatter"."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; the value is the exit status."""
    parser = argparse.ArgumentParser(
        prog="paceline plan", description="How much memory will the ranks of a training take?"
    )
    parser.add_argument(
        "model", help=f"a file with a function that makes the model: model.py:FUNCTION (default {_FUNCTION})"
    )
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="ranks, of all hosts")
    parser.add_argument("--hosts", type=int, default=1, metavar="H", help="hosts (default 1)")
    parser.add_argument("--optimizer", default="Adam", metavar="NAME", help="of torch.optim (default Adam)")
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the optimizer, such as momentum=0.9; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print values instead of a table, in bytes")
    options = parser.parse_args(arguments)
    plan = plan_memory(
        load_function(options.model),
        options.ranks,
        options.hosts,
        _optimizer(options.optimizer),
        **dict(options.option),
    )
    print(json.dumps(_as_json(plan), indent=1) if options.json else _table(plan))
    return 0


def load_function(where: str) -> Callable[[], Any]:
    """The function that makes the model.

    Args:
        where: `model.py:FUNCTION`, or `model.py` alone.

    Raises:
        ConfigError: There is no such file or function.
    """
    file, _, name = where.partition(":") if not Path(where).exists() else (where, "", "")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(
            f"There is no file {file}.", hint=f"paceline plan model.py:FUNCTION; the default is {_FUNCTION}"
        )
    module = _load(path)
    function = getattr(module, name or _FUNCTION, None)
    if not callable(function):
        raise ConfigError(
            f"{file} has no function {name or _FUNCTION}.",
            seen="functions without arguments: " + (", ".join(_candidates(module)) or "none"),
            hint=f"paceline plan {file}:FUNCTION -n 64",
        )
    made: Callable[[], Any] = function
    return made


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as `python model.py` does
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _candidates(module: ModuleType) -> list[str]:
    return [
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and all(each.default is not each.empty for each in inspect.signature(function).parameters.values())
    ]


def _optimizer(name: str) -> type[torch.optim.Optimizer]:
    found = getattr(torch.optim, name, None)
    if not inspect.isclass(found) or not issubclass(found, torch.optim.Optimizer):
        raise ConfigError(f"torch.optim has no optimizer {name}.", hint="Adam, AdamW, SGD, ...")
    return found


def _option(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    try:
        return name, ast.literal_eval(value) if sign else True
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE, such as momentum=0.9") from None


def _as_json(plan: MemoryPlan) -> dict[str, Any]:
    ways = {key: {**asdict(memory), "total": memory.total} for key, memory in plan.ways.items()}
    return {"ranks": plan.ranks, "hosts": plan.hosts, "one_copy": asdict(plan.sizes), "ways": ways}


def _table(plan: MemoryPlan) -> str:
    reference = plan.ways["torch_view"].total or 1
    rows = [list(_COLUMNS)]
    for memory in plan.ways.values():
        sizes = (memory.parameters, memory.gradients, memory.state, memory.total)
        rows.append([memory.label, *map(format_size, sizes), f"{memory.total / reference:.2f}"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]
    on = f"{plan.ranks} ranks on {plan.hosts} host{'s' if plan.hosts > 1 else ''}"
    head = f"{on}; one copy of the parameters takes {format_size(plan.sizes.parameters)}"
    if plan.is_allocated:
        head += ' (the model had to be made in memory: it cannot be made on the device "meta")'
    return "\n".join([head, "", *lines, "", _NOTES])
