"""Times steps on several hosts, beside the framework's own wrapper in the same rounds (`make hosts`).

python -m tests.hosts --layouts 2x2,2x1 --rates 100mbit,1gbit --sizes 100000,26214400 --rounds 7
python -m tests.hosts --layouts 2x2 --sizes 26214400 --ways torch,hosts,bf16,int8,topk
python -m tests.hosts --rates 10gbit --rounds 15
python -m tests.hosts --framework paddle --layouts 2x2 --rates 1gbit
python -m tests.hosts --layouts 2x1 --dtype bfloat16
python -m tests.hosts --layouts 2x2 --ways torch,alone,hosts
PACELINE_TEST_DEVICE=1 python -m tests.hosts --layouts 2x2 --rates 1gbit    on the stand-in for a GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.hosts.link_speed import carried_bits_per_s
from tests.hosts.measured import ALONE, COMPRESSED, ITEM_BYTES
from tests.hosts.namespaces import RATES, Hosts, why_not
from tests.hosts.rank import EXACT, WAYS

LAYOUTS = {
    "2x1": (0, 1),
    "3x1": (0, 1, 2),
    "2x2": (0, 0, 1, 1),
    "2x3": (0, 0, 0, 1, 1, 1),
    "2+1": (0, 0, 1),
    "1+2": (0, 1, 1),
    "2x2 in turn": (0, 1, 0, 1),
}
MEASURED = ("2x1", "3x1", "2x2", "2+1", "2x2 in turn")
SIZES = ("100000", "4000000", "26214400")
# On these links the processor has the largest effect.
MEASURED_AT = {"10gbit": (("2x1", "2x2"), SIZES[1:])}
CONGESTION = "cubic"
"""Linux's default, so that a figure does not depend on the setting of this machine."""
SECONDS_PER_MEASUREMENT = 300
_CARRIED = 0.6  # the fraction of a rate that a link must carry


def measure(
    layout: str,
    rate: str,
    nbytes: int,
    rounds: int,
    ways: tuple[str, ...] = WAYS,
    congestion: str = CONGESTION,
    framework: str = "torch",
    dtype: str = "float32",
    python: str = sys.executable,
) -> dict[str, Any]:
    """Run one job, whose ranks are `rank` or `paddle_rank`, and return its results.

    `python` is the interpreter of the ranks.

    Raises:
        RuntimeError: A rank failed. The message has the output of rank 0.
    """
    places = LAYOUTS[layout]
    # A round of one variant takes about a second, and at least one step.
    seconds = 2 * nbytes * 8 / RATES[rate].bits_per_s + 0.01
    steps = max(1, min(50, int(1 / seconds)))
    with tempfile.TemporaryDirectory() as folder, Hosts(max(places) + 1, rate, congestion) as hosts:
        result, outputs = Path(folder) / "result", [Path(folder) / f"rank-{r}" for r in range(len(places))]
        command = [
            python,
            "-m",
            {"torch": "tests.hosts.rank", "paddle": "tests.hosts.paddle_rank"}[framework],
            str(nbytes),
            str(rounds),
            str(steps),
            ",".join(ways),
            dtype,
        ]
        with open(outputs[0], "wb") as output:
            ranks = hosts.start_ranks(
                command, places, {"RESULT": str(result)}, stdout=output, stderr=subprocess.STDOUT
            )
            codes = [rank.wait(SECONDS_PER_MEASUREMENT) for rank in ranks]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}:\n{outputs[0].read_text()[-4000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def floor_bytes(layout: str, nbytes: int) -> float:
    """The fewest bytes that one of n hosts sends in an all-reduce between them: 2 (n - 1) / n * nbytes."""
    hosts = max(LAYOUTS[layout]) + 1
    return 2 * (hosts - 1) / hosts * nbytes


def row(layout: str, rate: str, found: dict[str, Any]) -> str:
    """One line of the table. Each ratio is the median over rounds of the ratio within a round."""
    seconds, sent, nbytes = found["seconds"], found["sent_bytes"], found["nbytes"]
    ways = list(seconds)
    incumbent = seconds[ways[0]]
    cells = [layout, rate, f"{nbytes / 1e6:.2f} MB", f"{statistics.median(incumbent) * 1e3:.1f}"]
    for way in ways[1:]:
        ratios = sorted(a / b for a, b in zip(seconds[way], incumbent, strict=True))
        cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")
    least = floor_bytes(layout, nbytes)
    if ALONE in ways:
        link_s = least * 8 / RATES[rate].bits_per_s
        for way in _averaging(ways):
            nets = [a - b for a, b in zip(seconds[way], seconds[ALONE], strict=True)]
            cells.append(f"{statistics.median(nets) / link_s:.2f}")
    cells += [f"{statistics.median(sent[way]) / least:.2f}" for way in _averaging(ways)]
    return f"| {' | '.join(cells)} |"


def _averaging(ways: Sequence[str]) -> list[str]:
    """The variants whose sent bytes are shown: not `group`, whose bytes the framework sends itself."""
    return [way for way in ways if way not in ("group", ALONE)]


def header(ways: Sequence[str]) -> str:
    titles = {
        "torch": "torch's DDP, ms",
        "paddle": "paddle.DataParallel, ms",
        "group": f"Paceline over the group / {ways[0]}",
        "hosts": f"Paceline in each host first / {ways[0]}",
        ALONE: f"the model alone / {ways[0]}",
        **{way: f"the same, {way} / {ways[0]}" for way in (*COMPRESSED, EXACT)},
    }
    short = {"hosts": "Paceline"}
    cells = ["hosts x ranks", "link", "gradients", *(titles[way] for way in ways)]
    if ALONE in ways:
        cells += [f"{short.get(way, way)} net of the model, x the link" for way in _averaging(ways)]
    cells += [f"{short.get(way, way)} sends, x floor" for way in _averaging(ways)]
    return f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", help=f"of {', '.join(LAYOUTS)}; default: {', '.join(MEASURED)}")
    parser.add_argument("--rates", default=",".join(RATES), help=f"of {', '.join(RATES)}")
    parser.add_argument("--sizes", help=f"bytes of gradients; default: {', '.join(SIZES)}")
    parser.add_argument("--congestion", default=CONGESTION, help="of TCP; '': what this machine has")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--dtype", default="float32", choices=ITEM_BYTES, help="of the parameters; with torch"
    )
    every = (*WAYS[1:], *COMPRESSED, EXACT, ALONE)
    parser.add_argument("--framework", default="torch", choices=("torch", "paddle"))
    parser.add_argument("--ways", help=f"the framework first, then of {', '.join(every)}")
    options = parser.parse_args()
    ways = tuple(options.ways.split(",")) if options.ways else (options.framework, *WAYS[1:])
    if ways[0] != options.framework or not set(ways[1:]) <= set(every):
        parser.error(f"--ways: {options.framework} first, then of {', '.join(every)}")
    if options.framework == "paddle" and (options.dtype != "float32" or {ALONE, EXACT} & set(ways)):
        parser.error(f"--framework paddle: neither another dtype nor {ALONE} or {EXACT}")
    if reason := why_not():
        print(f"python -m tests.hosts: {reason}", file=sys.stderr)
        return 2
    print(header(ways))
    for rate in options.rates.split(","):
        if not carries(rate, options.congestion):
            continue
        layouts, sizes = MEASURED_AT.get(rate, (MEASURED, SIZES))
        for layout in options.layouts.split(",") if options.layouts else layouts:
            for size in options.sizes.split(",") if options.sizes else sizes:
                how = options.congestion, options.framework, options.dtype
                found = measure(layout, rate, int(size), options.rounds, ways, *how)
                print(row(layout, rate, found), flush=True)
    return 0


def carries(rate: str, congestion: str) -> bool:
    """Print the rate that a link reaches here; return whether that is most of the nominal rate."""
    with Hosts(2, rate, congestion) as hosts:
        carried = carried_bits_per_s(hosts)
    does = carried >= _CARRIED * RATES[rate].bits_per_s
    verdict = "" if does else ": left out, this machine is too slow, or too busy"
    print(f"{rate}: one connection carries {carried / 1e9:.2f} Gbit/s{verdict}", file=sys.stderr, flush=True)
    return does


if __name__ == "__main__":
    sys.exit(main())
