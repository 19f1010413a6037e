"""Finds functions in autograd's graph that exchange gradients between ranks in backward."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from paceline.reducer.backward.collectives_in_backward import enclosed_by, names_a_collective, names_one

_COMPILERS = ("torch._functorch.", "torch._dynamo.", "torch._inductor.")
_OPERATORS = frozenset(("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d"))
# Types of nodes that exchange nothing. Each of torch's own nodes has a type of its own. Nodes that other
# libraries have written in C++ share one type, which is never in here.
_harmless: set[type] = set()
_SHARED = "CppFunction"
_by_function: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def find_exchanges(roots: Sequence[Any]) -> list[str]:
    found: list[str] = []
    nodes, seen = list(roots), set(roots)
    for node in nodes:  # grows meanwhile; `nodes_from` would take 1.5 times as long
        if type(node) not in _harmless and (name := _exchange_of(node)) and name not in found:
            found.append(name)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def _exchange_of(node: Any) -> str:
    kind = type(node)
    function: type[torch.autograd.Function] | None = getattr(node, "_forward_cls", None)
    if function is None:
        name: str = node.name()
        is_exchange = "c10d" in name or any(map(names_one, name.split("::")))
        if not is_exchange and kind.__name__ != _SHARED:
            _harmless.add(kind)
        return name if is_exchange else ""
    known = _by_function.get(function)
    if known is None:
        known = _by_function[function] = _exchange_in(function)
    return known


def _exchange_in(function: type[torch.autograd.Function]) -> str:
    module = function.__module__
    if module.startswith("paceline."):
        return ""
    if module.startswith(_COMPILERS):
        calls = (call for graph in _graphs_of(function) for call in _exchanging_calls(graph))
        return f"compiled code ({call})" if (call := next(calls, "")) else ""
    is_exchange = module.startswith("torch.distributed.nn.") or any(
        names_a_collective(each, _operators) for each in (function.backward, function.vjp)
    )
    return f"{module}.{function.__qualname__}" if is_exchange else ""


def _graphs_of(function: Any) -> Iterator[GraphModule]:
    kept = getattr(function, "_lazy_backward_info", None)
    graphs = [getattr(kept, "bw_module", None), *enclosed_by(function.backward)]
    if (load := getattr(kept, "bw_module_fn", None)) is not None:  # from a cache on disk
        graphs.append(load())
    for graph in graphs:
        if isinstance(graph, GraphModule):
            yield from (each for each in graph.modules() if isinstance(each, GraphModule))


def _exchanging_calls(graph: GraphModule) -> Iterator[str]:
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            namespace, _, name = str(node.target).partition(".")
            name = name.partition(".")[0]
            is_exchange = namespace in _OPERATORS and name != "wait_tensor"
            is_exchange |= names_one(name) or any(map(_names, _operators({name})))
        else:
            name = getattr(node.target, "__name__", "")
            is_exchange = names_one(name) or _names(node.target)
        if is_exchange:
            yield str(node.target) if "." in str(node.target) else name


def _names(function: object) -> bool:
    return names_a_collective(function, _operators)


def _operators(names: set[str]) -> Iterable[object]:
    custom = sys.modules.get("torch._library.custom_ops")
    known = getattr(custom, "OPDEFS", {})
    return [each._init_fn for name, each in list(known.items()) if name.rpartition("::")[2] in names]
