"""Measures what a job's secret and TLS cost: at the start of a job, and per second on the control channel.

python -m tests.hosts.secrecy [--rounds 11] [--hold-s 2]    as root: hosts are network namespaces

First 4 and then 32 ranks without a framework hold only a control channel; then 4 ranks run one backward with
torch. The processes stay for all rounds, and each round has one turn of each variant: no secret, a secret
without TLS (as on a machine without openssl), and both. A variant that needs a certificate makes a new one in
each turn, as each new job does. Every turn checks that the channel is encrypted if it should be; turns with
torch also check a gradient.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.health import control_channel, tls
from tests.hosts.listening import FolderExchange, facts_of
from tests.hosts.namespaces import Hosts, why_not

WAYS = ("no secret", "secret, without TLS", "secret and TLS 1.3")
SECRET = "0123456789abcdef" * 4
PORT = 29600
WITHIN_S = 60.0
LAYOUTS = {"channel-4": (0, 0, 1, 1), "channel-32": (0,) * 16 + (1,) * 16, "torch": (0, 0, 1, 1)}
"""The host of each rank, by kind of job."""


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """A context in which this process's next channel uses this variant."""
    tls.own_certificate.cache_clear()
    if name != WAYS[0]:
        os.environ["PACELINE_SECRET"] = SECRET
    before = tls.own_certificate
    if name == WAYS[1]:
        tls.own_certificate = lambda: None  # type: ignore[assignment]
    try:
        yield
    finally:
        tls.own_certificate = before
        os.environ.pop("PACELINE_SECRET", None)


def processor_s() -> float:
    """Processor seconds of this process and of programs that it has waited for, such as openssl."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def held(channel: control_channel.ControlChannel, name: str, hold_s: float) -> float:
    """Processor seconds that the channel's thread takes in a second of an idle job."""
    encrypted = {each.is_encrypted for each in channel._connections.values()}
    assert encrypted == {name == WAYS[2]}, (name, encrypted)
    clock = time.pthread_getcpuclockid(channel._thread.ident or 0)
    time.sleep(0.5)  # by then the handshakes have ended
    begun, used = time.monotonic(), time.clock_gettime(clock)
    time.sleep(hold_s)
    assert channel.failure is None, channel.failure
    return (time.clock_gettime(clock) - used) / (time.monotonic() - begun)


def in_torch(folder: Path, turn: int, name: str, hold_s: float) -> dict[str, float]:
    """Run one turn with torch, from init to a backward; return the seconds of each phase on this rank."""
    import torch
    import torch.distributed as dist

    from paceline.torch import DistributedDataParallel, init_process_group

    torch.set_num_threads(1)
    os.environ["MASTER_PORT"] = str(PORT + turn)
    exchange = FolderExchange(folder / str(turn), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    exchange.all_gather(b"", WITHIN_S)
    begun, used = time.monotonic(), processor_s()
    init_process_group("gloo")
    joined = time.monotonic()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    wrapped, after = time.monotonic(), processor_s()
    model(torch.full((2, 4), exchange.rank + 1.0)).sum().backward()
    assert model.module.weight.grad.flatten().tolist() == [exchange.world_size + 1.0] * 4
    (channel,) = [each for each in control_channel._channels if not each._is_closed]
    second = held(channel, name, hold_s)
    dist.barrier()
    channel.close()  # the model may stay a while, as garbage
    dist.destroy_process_group()
    return {"group": joined - begun, "model": wrapped - joined, "processor": after - used, "second": second}


def alone(folder: Path, turn: int, name: str, hold_s: float) -> dict[str, float]:
    """Run one turn of a channel alone; return the seconds of each phase on this rank."""
    layout = LAYOUTS[f"channel-{os.environ['WORLD_SIZE']}"]
    secret = os.environ.get("PACELINE_SECRET", "").encode()
    hosts, facts = facts_of(layout, secret)
    exchange = FolderExchange(folder / str(turn), facts.rank, facts.world_size)
    exchange.all_gather(b"", WITHIN_S)
    begun, used = time.monotonic(), processor_s()
    channel = control_channel.form_channel(exchange, facts, hosts, secret, WITHIN_S)
    formed, after = time.monotonic(), processor_s()
    second = held(channel, name, hold_s)
    exchange.all_gather(b"", WITHIN_S)
    channel.close()
    return {"channel": formed - begun, "processor": after - used, "second": second}


def run_rank(folder: Path, part: str, rounds: int, hold_s: float) -> None:
    """Run all turns of one rank, and print one line of JSON for each."""
    logging.disable(logging.WARNING)  # Paceline warns of a missing secret and of missing TLS
    sample = in_torch if part == "torch" else alone
    for turn in range(rounds * len(WAYS)):
        name = WAYS[(turn + turn // len(WAYS)) % len(WAYS)]
        with way(name):
            found = sample(folder, turn, name, hold_s)
        print(json.dumps({"way": name, **found}), flush=True)


def measure(part: str, rounds: int, hold_s: float) -> list[list[dict[str, Any]]]:
    """The output of each rank, turn by turn."""
    layout = LAYOUTS[part]
    with tempfile.TemporaryDirectory() as name, Hosts(2, "1gbit") as hosts:
        for turn in range(rounds * len(WAYS)):
            (Path(name) / str(turn)).mkdir()
        command = [sys.executable, "-m", "tests.hosts.secrecy", "--rank", name, "--part", part]
        command += ["--rounds", str(rounds), "--hold-s", str(hold_s)]
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        ranks = hosts.start_ranks(command, layout, {}, cwd=Path(__file__).parents[2], **options)
        outputs = [rank.communicate()[0] for rank in ranks]
        assert not any(rank.returncode for rank in ranks), outputs
    return [[json.loads(line) for line in output.splitlines()] for output in outputs]


HEADS = {
    "group": "init_process_group()",
    "model": "DistributedDataParallel()",
    "channel": "forming the channel",
    "processor": "processor, all ranks",
    "hub": "hub, each second",
    "rank": "a rank, each second",
}
PICK: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "processor": ("processor", sum),
    "hub": ("second", lambda each: each[0]),
    "rank": ("second", lambda each: statistics.median(each[1:])),
}
"""How these columns combine the ranks' values. The other columns show the slowest rank."""


def table(samples: list[list[dict[str, Any]]], rounds: int) -> list[str]:
    """One row per variant: medians over rounds, and medians of the differences from the first variant."""
    parts = [part for part in HEADS if part in samples[0][0] or part in PICK]
    lines = [f"| way | {' | '.join(HEADS[part] for part in parts)} |", f"|---|{'--:|' * len(parts)}"]
    for name in WAYS:
        cells = []
        for part in parts:
            own, first = (values(samples, part, way, rounds) for way in (name, WAYS[0]))
            more = statistics.median([a - b for a, b in zip(own, first, strict=True)])
            cells.append(
                f"{statistics.median(own):.3g} ms"
                + (f" ({float(f'{more:.2g}'):+g})" if name != WAYS[0] else "")
            )
        lines.append(f"| {' | '.join([name, *cells])} |")
    return lines


def values(samples: list[list[dict[str, Any]]], part: str, name: str, rounds: int) -> list[float]:
    """Milliseconds of a phase in each round except the first, which imports modules and warms up."""
    measured, pick = PICK.get(part, (part, max))
    turns = [turn for turn, row in enumerate(samples[0][: rounds * len(WAYS)]) if row["way"] == name]
    return [1e3 * pick([rank[turn][measured] for rank in samples]) for turn in turns[1:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="one more is not counted")
    parser.add_argument("--hold-s", type=float, default=2.0)
    parser.add_argument("--part", choices=LAYOUTS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.rank, arguments.part, arguments.rounds, arguments.hold_s)
        return 0
    if reason := why_not():
        print(f"python -m tests.hosts.secrecy: {reason}", file=sys.stderr)
        return 2
    for part in [arguments.part] if arguments.part else LAYOUTS:
        rounds = arguments.rounds + 1
        samples = measure(part, rounds, arguments.hold_s)
        what = "one backward with torch" if part == "torch" else "the channel alone"
        print(f"\n{len(samples)} ranks on two hosts, {what}\n")
        print("\n".join(table(samples, rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
