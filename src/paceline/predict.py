"""`paceline predict`: predicts how long averaging gradients takes, and how much memory training needs.

Nothing is measured and no model is trained. Memory comes from `plan_memory`, which counts the copies of
parameters, gradients and optimizer state. The time of one average comes from a model of the cost. Its routes
are those that the reducer plans (`plan_route`), so messages and bytes are counted and not estimated.

The model of one average, for H hosts of L ranks, S bytes of gradients and links of B bit/s in each direction
  torch     Every bucket goes round one ring of all N = H L ranks: 2 (N - 1) steps of one latency each, and
            each host sends 2 (N - 1) / N of the bucket, over one connection.
  Paceline  Every rank exchanges its shard of each bucket with its peers on the other hosts. This takes the
            latencies of one or two rounds, and the longest of three things that happen at the same time: the
            link carries L shards, over L connections; each rank starts and ends its messages one after the
            other; the memory of the host is read and written.
Source of the ring: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69 (2009).
docs/scaling.md compares the model with measurements.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import _core, units
from paceline.errors import ConfigError
from paceline.reducer.between_hosts.compressed_sums import ENCODINGS
from paceline.reducer.between_hosts.message_headers import HEADER_BYTES
from paceline.reducer.between_hosts.routes import BUCKET_BYTES, plan_route
from paceline.units import format_ratio, format_size, format_time

if TYPE_CHECKING:
    from paceline.sharding.memory_estimate import MemoryPlan

_TORCH_BUCKETS = (1 << 20, 25 << 20)  # torch's first bucket, and the others
_ITEM_BYTES = 4  # sums are sent as float32
_MOST_HOSTS_OF_PADDLE = 16  # `MOST_HOSTS` of paceline.paddle.communicator.hosts
_MOST_HOSTS = 1 << 16  # a route is planned for each
_ON_THE_WIRE = 1538 / 1448  # Ethernet, IP and TCP around 1448 bytes of a message
_FUNCTION = "make_model"
_EPILOG = """\
examples:
  paceline predict model.py:build -n 64 --optimizer AdamW       memory of 64 ranks on one host
  paceline predict model.py:build -n 16 --hosts 4               memory, and the time of averaging over 4 hosts
  paceline predict --gradients 100MiB -n 8 --hosts 2,8,64       time alone, without a model

Memory is predicted for models of torch, in files that can be imported: FUNCTION returns the model, which is
not allocated. Nothing is measured: `paceline tune train.py` measures your script on this machine.
"""
_ABOUT_MEMORY = """\
gradients: after a step, at most, with the memory in which they are averaged. Not counted: activations, and
what a process needs before there is a model (Python and torch). Bucket view: gradient_as_bucket_view=True;
one model: share_parameters=True; scatter: reduce="scatter"."""


@dataclass(frozen=True)
class Machines:
    """The speed of the hosts and their links.

    Attributes:
        bits_per_s: Bandwidth of a host's link in each direction.
        latency_s: From the start of a message in one process to its end in another.
        message_s: Processor time of each message that a rank sends or receives.
        connection_bits_per_s: Largest bandwidth of one TCP connection.
        memory_bytes_per_s: Memory bandwidth of a host, reads and writes of all cores.
    """

    bits_per_s: float
    latency_s: float = 50e-6
    message_s: float = 30e-6
    connection_bits_per_s: float = 8.6e9
    memory_bytes_per_s: float = 200e9


@dataclass(frozen=True)
class Prediction:
    """How long one average takes.

    Attributes:
        seconds: From the first gradient to the last mean, if no computation overlaps with it.
        sent_bytes: Bytes that one host sends, without the headers of packets.
        limit: The bottleneck: "link", "connections", "messages", "latency" or "memory".
    """

    seconds: float
    sent_bytes: float
    limit: str


def predict_torch(
    nbytes: int, hosts: int, ranks_per_host: int, machines: Machines, *, in_turn: bool = False
) -> Prediction:
    """The time of torch's DDP on Gloo.

    `in_turn`: consecutive ranks are on different hosts, so that every rank sends over the host's link.
    """
    ranks = hosts * ranks_per_host
    first, rest = _TORCH_BUCKETS
    buckets = 1 + math.ceil(max(0, nbytes - first) / rest)
    crossings = ranks_per_host if in_turn else 1
    sent = 2 * (ranks - 1) / ranks * nbytes * crossings
    carried = min(machines.bits_per_s, crossings * machines.connection_bits_per_s)
    link = sent * _ON_THE_WIRE * 8 / carried
    latency = buckets * 2 * (ranks - 1) * machines.latency_s
    limit = "latency" if latency > link else _link_or_connections(machines, crossings)
    return Prediction(latency + link, sent, limit)


def predict_paceline(
    nbytes: int, hosts: int, ranks_per_host: int, machines: Machines, compression: str = ""
) -> Prediction:
    """The time of Paceline over hosts whose ranks share memory.

    Example:
        >>> round(predict_paceline(100 << 20, 8, 8, Machines(1e10)).seconds, 3)
        0.156
    """
    messages, sent, rounds = 0, 0.0, 0
    followed, last = divmod(max(0, nbytes - 1), BUCKET_BYTES)
    for size, count, is_followed in ((BUCKET_BYTES, followed, True), (last + 1, 1, False)):
        if not count:
            continue
        sends_values = ranks_per_host == 1 and not compression
        value_bytes = _ITEM_BYTES if sends_values else None
        route = plan_route(
            size // _ITEM_BYTES,
            _ITEM_BYTES,
            0,
            ranks_per_host,
            hosts,
            value_bytes=value_bytes,
            is_followed=is_followed,
        )
        pieces = len(route.part_of(0))
        rounds_here = 1 if route.is_one_round else 2
        # Each round sends to all other hosts and receives from them: chunks to owners, then sums to all.
        each = rounds_here * (hosts - 1) * pieces
        elements = len(route.shard)
        payload = (
            _core.encoded_bytes(ENCODINGS[compression], elements) if compression else elements * _ITEM_BYTES
        )
        crossing = payload * (hosts - 1) if rounds_here == 1 else payload * 2 * (hosts - 1) / hosts
        messages += 2 * each * count
        headers = 0 if route.is_of_values else each  # values: three per backward, which is negligible
        sent += (crossing + headers * HEADER_BYTES) * count
        rounds = max(rounds, rounds_here)
    sent *= ranks_per_host
    carried = min(machines.bits_per_s, ranks_per_host * machines.connection_bits_per_s)
    side_by_side = {
        _link_or_connections(machines, ranks_per_host): sent * _ON_THE_WIRE * 8 / carried,
        "messages": messages * machines.message_s,
        "memory": 2 * ranks_per_host * nbytes / machines.memory_bytes_per_s,
    }
    latency = rounds * machines.latency_s
    longest = max(side_by_side, key=side_by_side.__getitem__)
    limit = "latency" if latency > side_by_side[longest] else longest
    return Prediction(latency + side_by_side[longest], sent, limit)


def _link_or_connections(machines: Machines, connections: int) -> str:
    return "link" if machines.bits_per_s <= connections * machines.connection_bits_per_s else "connections"


def efficiency(step_s: float, average_s: float) -> float:
    """Part of the throughput that is left, if averaging overlaps with two thirds of a step."""
    return step_s / (step_s + max(0.0, average_s - step_s * 2 / 3))


@dataclass(frozen=True)
class Times:
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]
    values: list[dict[str, Any]]


def predict_times(
    nbytes: int,
    hosts: Sequence[int],
    ranks_per_host: int,
    gbits_per_s: Sequence[float],
    step_s: float | None = None,
) -> Times:
    """Predict the time of one average, and with `step_s` the part of the throughput that is left."""
    columns = ["hosts x ranks", "link, Gbit/s", "torch's DDP", "Paceline", "faster", "bf16", "int8", "limit"]
    if step_s is not None:
        columns += ["throughput: torch", "Paceline", "int8"]
    rows, values = [], []
    for count in hosts:
        for rate in gbits_per_s:
            machines = Machines(rate * 1e9)
            theirs = predict_torch(nbytes, count, ranks_per_host, machines)
            ours, bf16, int8 = (
                predict_paceline(nbytes, count, ranks_per_host, machines, name)
                for name in ("", "bf16", "int8")
            )
            faster = format_ratio(theirs.seconds / ours.seconds)
            row = [f"{count} x {ranks_per_host}", f"{rate:g}", format_time(theirs.seconds)]
            row += [format_time(ours.seconds), faster, format_time(bf16.seconds), format_time(int8.seconds)]
            row.append(ours.limit)
            if step_s is not None:
                row += [f"{efficiency(step_s, each.seconds):.0%}" for each in (theirs, ours, int8)]
            rows.append(row)
            predictions = {"torch": theirs, "paceline": ours, "bf16": bf16, "int8": int8}
            seconds = {name: each.seconds for name, each in predictions.items()}
            values.append({"hosts": count, "gbits_per_s": rate, "limit": ours.limit, "seconds": seconds})
    notes = [
        "Computed from a model of the cost, for gradients in float32: "
        f"{Machines.latency_s * 1e6:g} us of latency, {Machines.message_s * 1e6:g} us of a core "
        f"for each message, {Machines.connection_bits_per_s / 1e9:g} Gbit/s in one connection, "
        f"{Machines.memory_bytes_per_s / 1e9:g} GB/s of memory. docs/scaling.md compares it with "
        "measurements at 100 Mbit/s to 10 Gbit/s, where two cores did the work of all hosts and took 1.6 to "
        "4 times as long as the model; nothing was measured above that.",
        "bf16, int8: Paceline with compress_between_hosts. limit: the bottleneck of Paceline without it.",
    ]
    if max(hosts) > _MOST_HOSTS_OF_PADDLE:
        notes.append(
            f"Paddle on more than {_MOST_HOSTS_OF_PADDLE} hosts: gradients go over its process group alone, "
            "as with paddle.DataParallel."
        )
    if step_s is not None:
        notes.append(
            f"throughput: of a step of {format_time(step_s)}, when averaging overlaps with two thirds of it."
        )
    return Times(columns, rows, notes, values)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="paceline predict",
        allow_abbrev=False,
        description="How much memory will a training need, and how long will averaging over hosts take?",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", help=f"model.py:FUNCTION that returns the model (default {_FUNCTION})")
    add("--gradients", type=units.size, metavar="SIZE", help="size of the gradients, in place of a model")
    add("-n", "--ranks", type=units.at_least(1), required=True, metavar="N", help="ranks on each host")
    add(
        "--hosts",
        type=units.listed(units.at_least(1, _MOST_HOSTS)),
        metavar="A,B",
        help="numbers of hosts (default: 1 with a model, 2,8,64,1024 without)",
    )
    add(
        "--rates",
        type=units.listed(units.positive("Gbit/s")),
        default=(1.0, 10.0, 100.0),
        metavar="A,B",
        help="bandwidths of a host's link in Gbit/s (default 1,10,100)",
    )
    add(
        "--step-ms",
        type=units.positive("milliseconds"),
        metavar="T",
        help="a training step without averaging, to predict what is left of the throughput",
    )
    add("--optimizer", default="Adam", metavar="NAME", help="the model's, of torch.optim (default Adam)")
    add(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of the optimizer, such as momentum=0.9; may be repeated",
    )
    add("--json", type=Path, metavar="FILE", help="write the values, in bytes and seconds")
    given = parser.parse_args(arguments)
    if (given.model is None) == (given.gradients is None):
        raise ConfigError(
            "There must be either a model or --gradients.",
            hint="`paceline predict model.py:FUNCTION -n 8`, or `paceline predict --gradients 100MiB -n 8`",
        )
    hosts = given.hosts or ((1,) if given.model else (2, 8, 64, 1024))
    several = [count for count in hosts if count > 1]
    if not several and given.gradients is not None:
        raise ConfigError("On one host there is no network to average over.", hint="--hosts 2,8")
    values: dict[str, Any] = {"ranks_per_host": given.ranks}
    parts: list[str] = []
    nbytes = given.gradients
    if given.model is not None:
        make_model = load_function(given.model)
        plans = [_plan(given, make_model, count) for count in hosts]
        nbytes = -(-plans[0].sizes.gradients // _ITEM_BYTES) * _ITEM_BYTES
        values["memory"] = [_as_json(plan) for plan in plans]
        parts += [*(_memory(plan) for plan in plans), _ABOUT_MEMORY]
    if several and nbytes:
        step_s = None if given.step_ms is None else given.step_ms / 1e3
        times = predict_times(nbytes, several, given.ranks, given.rates, step_s)
        values |= {"gradient_bytes": nbytes, "step_s": step_s, "times": times.values}
        parts.append(f"Time of averaging {format_size(nbytes)} of gradients over hosts")
        parts += [_table([times.columns, *times.rows]), "\n".join(times.notes)]
    if given.json is not None:
        try:
            given.json.write_text(json.dumps(values, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"{given.json} can't be written.", seen=error.strerror or "") from error
    print("\n\n".join(parts))
    return 0


def load_function(where: str) -> Callable[[], Any]:
    """Import the function that returns the model."""
    file, _, name = where.partition(":") if not Path(where).exists() else (where, "", "")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(
            f"There is no file {file}.",
            hint=f"paceline predict model.py:FUNCTION; the default is {_FUNCTION}",
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as `python model.py` does
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name or _FUNCTION, None)
    if not callable(function):
        callables = [
            key
            for key, each in inspect.getmembers(module, inspect.isfunction)
            if each.__module__ == module.__name__
            and all(p.default is not p.empty for p in inspect.signature(each).parameters.values())
        ]
        raise ConfigError(
            f"{file} has no function {name or _FUNCTION}.",
            seen="functions without arguments: " + (", ".join(callables) or "none"),
            hint=f"paceline predict {file}:FUNCTION -n 64",
        )
    made: Callable[[], Any] = function
    return made


def _plan(given: argparse.Namespace, make_model: Callable[[], Any], hosts: int) -> MemoryPlan:
    try:
        from paceline.torch.sharding.memory_plan import optimizer_named, plan_memory
    except ImportError as error:
        raise ConfigError("Memory is predicted for models of torch.", seen=str(error)) from error
    optimizer = optimizer_named(given.optimizer)
    return plan_memory(make_model, given.ranks * hosts, hosts, optimizer, **dict(given.option))


def _option(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    try:
        return name, ast.literal_eval(value) if sign else True
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE, such as momentum=0.9") from None


def _as_json(plan: MemoryPlan) -> dict[str, Any]:
    variants = {key: {**asdict(memory), "total": memory.total} for key, memory in plan.ways.items()}
    return {"ranks": plan.ranks, "hosts": plan.hosts, "one_copy": asdict(plan.sizes), "variants": variants}


def _memory(plan: MemoryPlan) -> str:
    reference = plan.ways["torch_view"].total or 1
    rows = [["variant", "parameters", "gradients", "optimizer", "each host", "of torch DDP's"]]
    for memory in plan.ways.values():
        sizes = (memory.parameters, memory.gradients, memory.state, memory.total)
        rows.append([memory.label, *map(format_size, sizes), f"{memory.total / reference:.2f}"])
    on = f"{plan.ranks} ranks on {plan.hosts} host{'s' if plan.hosts > 1 else ''}"
    head = f"Memory of {on}; one copy of the parameters takes {format_size(plan.sizes.parameters)}"
    if plan.is_allocated:
        head += ' (the model had to be made in memory: it cannot be made on the device "meta")'
    return f"{head}\n\n{_table(rows)}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )
