"""`paceline bench predict`: what averaging gradients over several hosts will take, by a model of the cost.

One idea: the routes are the ones that the reducer plans (`reducer.hosts.plan_route`), so messages and bytes
are counted and not guessed; five figures of the machines turn them into seconds. Nothing is measured here:
docs/scaling.md compares the model with measurements.

The model of one average, for H hosts of L ranks, S bytes of gradients and links of B bit/s in each direction
  torch    Every bucket goes round one ring of all N = H L ranks: 2 (N - 1) steps of one latency each, and
           each host sends 2 (N - 1) / N of the bucket, over one connection.
  ours     Every rank sends its share of each bucket to its partners: the latencies of one or two rounds, and
           the longest of three things that happen side by side: the link carries L shares, over L
           connections; each rank starts and ends its messages one after the other; the memory of the host is
           read and written.
Source of the ring: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69 (2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline import _core
from paceline.bench.report import Report
from paceline.bench.units import format_ratio, format_size, format_time
from paceline.reducer.between_hosts.routes import BUCKET_BYTES, plan_route
from paceline.reducer.between_hosts.sum_formats import ENCODINGS
from paceline.reducer.between_hosts.wire import HEADER_BYTES

_TORCH_BUCKETS = (1 << 20, 25 << 20)  # torch's first bucket, and the others
_ITEM_BYTES = 4  # sums travel as float32
_MOST_HOSTS_OF_PADDLE = 16  # `MOST_HOSTS` of paceline.paddle.link.hosts
_ON_THE_WIRE = 1538 / 1448  # Ethernet, IP and TCP around 1448 bytes of a message


@dataclass(frozen=True)
class Machines:
    """What the hosts and their links can do.

    Attributes:
        bits_per_s: What a host's link carries in each direction.
        latency_s: From a message's start in one process to its end in another.
        message_s: What each message that a rank sends or receives takes of a core, from Python.
        connection_bits_per_s: The most that one TCP connection carries.
        memory_bytes_per_s: Read and written by all cores of a host.
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
        seconds: From the first gradient to the last mean, if nothing hides it.
        sent_bytes: What one host sends, without the headers of packets.
        limit: What decides: "link", "connections", "messages", "latency" or "memory".
    """

    seconds: float
    sent_bytes: float
    limit: str


def predict_torch(
    nbytes: int, hosts: int, ranks_per_host: int, machines: Machines, *, in_turn: bool = False
) -> Prediction:
    """torch's DDP on Gloo.

    Args:
        nbytes: Size of the gradients.
        hosts: At least 2.
        ranks_per_host: Number of ranks on each host.
        machines: What they can do.
        in_turn: Ranks are assigned to the hosts in turn, so that every step of the ring crosses every link
            `ranks_per_host` times; otherwise in blocks.
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


def predict(
    nbytes: int, hosts: int, ranks_per_host: int, machines: Machines, compression: str = ""
) -> Prediction:
    """Paceline over hosts whose ranks share memory.

    Args:
        nbytes: Size of the gradients.
        hosts: At least 2.
        ranks_per_host: Number of ranks on each host.
        machines: What they can do.
        compression: A value of compress_between_hosts; "": none.

    Example:
        >>> round(predict(100 << 20, 8, 8, Machines(1e10)).seconds, 3)
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
        way = 1 if route.is_one_round else 2
        # A part goes to its owner and its sum back to all, so each round sends to all others, and hears them.
        each = way * (hosts - 1) * pieces
        elements = len(route.share)
        payload = (
            _core.encoded_bytes(ENCODINGS[compression], elements) if compression else elements * _ITEM_BYTES
        )
        crossing = payload * (hosts - 1) if way == 1 else payload * 2 * (hosts - 1) / hosts
        messages += 2 * each * count
        headers = 0 if route.is_of_values else each  # a pass has three then, which is nothing
        sent += (crossing + headers * HEADER_BYTES) * count
        rounds = max(rounds, way)
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
    """The part of the ideal throughput that is left.

    Args:
        step_s: A step of one rank without any averaging.
        average_s: An average. What fits into the backward, two thirds of a step, hides behind it.

    Example:
        >>> efficiency(0.3, 0.15), round(efficiency(0.3, 0.5), 3)
        (1.0, 0.5)
    """
    return step_s / (step_s + max(0.0, average_s - step_s * 2 / 3))


def run(
    nbytes: int,
    hosts: Sequence[int],
    ranks_per_host: int,
    gbits_per_s: Sequence[float],
    command: str,
    step_s: float | None = None,
) -> Report:
    """A table for several numbers of hosts and rates.

    Args:
        nbytes: Size of the gradients.
        hosts: Numbers of hosts, each at least 2.
        ranks_per_host: Number of ranks on each host.
        gbits_per_s: Rates of a host's link.
        command: The command that makes it again.
        step_s: A step without averaging; None: nothing is said of throughput.
    """
    columns = ["hosts x ranks", "link, Gbit/s", "torch's DDP", "Paceline", "faster", "bf16", "int8", "limit"]
    if step_s is not None:
        columns += ["throughput: torch", "Paceline", "int8"]
    rows: list[list[str]] = []
    data = []
    for count in hosts:
        rows.append([])
        for rate in gbits_per_s:
            machines = Machines(rate * 1e9)
            theirs = predict_torch(nbytes, count, ranks_per_host, machines)
            ours, bf16, int8 = (
                predict(nbytes, count, ranks_per_host, machines, name) for name in ("", "bf16", "int8")
            )
            faster = format_ratio(theirs.seconds / ours.seconds)
            row = [f"{count} x {ranks_per_host}", f"{rate:g}", format_time(theirs.seconds)]
            row += [format_time(ours.seconds), faster, format_time(bf16.seconds), format_time(int8.seconds)]
            row.append(ours.limit)
            if step_s is not None:
                row += [f"{efficiency(step_s, each.seconds):.0%}" for each in (theirs, ours, int8)]
            rows.append(row)
            ways = {"torch": theirs, "paceline": ours, "bf16": bf16, "int8": int8}
            seconds = {name: each.seconds for name, each in ways.items()}
            data.append({"hosts": count, "gbits_per_s": rate, "limit": ours.limit, "seconds": seconds})
    notes = [
        "Computed from a model of the cost, and not measured: "
        f"{Machines.latency_s * 1e6:g} us from process to process, {Machines.message_s * 1e6:g} us of a core "
        f"for each message, {Machines.connection_bits_per_s / 1e9:g} Gbit/s in one connection, "
        f"{Machines.memory_bytes_per_s / 1e9:g} GB/s of memory. docs/scaling.md compares it with "
        "measurements at 100 Mbit/s to 10 Gbit/s, where two cores did the work of all hosts and took 1.6 to "
        "4 times as long as the model; nothing was measured above that.",
        "limit: what decides Paceline's time without compression.",
    ]
    if max(hosts) > _MOST_HOSTS_OF_PADDLE:
        notes.append(
            f"Paddle on more than {_MOST_HOSTS_OF_PADDLE} hosts: gradients go over its process group alone, "
            "as with paddle.DataParallel."
        )
    if step_s is not None:
        notes.append(
            f"throughput: of a step of {format_time(step_s)}, when averaging hides behind two thirds of it."
        )
    title = f"Averaging {format_size(nbytes)} of gradients over hosts: a prediction"
    values = {"bytes": nbytes, "ranks_per_host": ranks_per_host, "step_s": step_s, "rows": data}
    return Report("predict", title, command, None, columns, rows[1:], notes, values)
