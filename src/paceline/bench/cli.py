"""`paceline bench ...`: the command line of the bench. Imports errors, and a bench only when it is run."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.contest import Entry, Plan
    from paceline.bench.report import Report

_MOST_HOSTS = 1 << 16  # of a prediction, which plans the route of each
_EPILOG = """\
Contenders take turns, round after round, so that whatever else this machine does hits all alike.
Results meant to be kept: --markdown benchmarks/results (a folder: the file names itself).
"""


def register(subparsers: Any) -> None:
    """Add `bench` to the subparsers of the `paceline` command."""
    bench = subparsers.add_parser("bench", help="measure Paceline against Gloo, Open MPI, torch's DDP")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    _add_all_reduce(benches)
    _add_step(benches)
    _add_killed(benches)
    _add_memory(benches)
    _add(benches, "features", _features, 30, "what find_unused_parameters and static_graph add to a step")
    _add(benches, "hook", _hook, 300, "what taking gradients adds to a backward on one rank", has_ranks=False)
    _add_trace(benches)
    _add_optimizer(benches)
    _add_throughput(benches)
    _add_data(benches)
    what = "how long a program that wraps a model and ends takes, launcher and imports included"
    _add(benches, "start", _start, 10, what, has_starts=False)
    _add_predict(benches)


def _add(
    benches: Any,
    name: str,
    run: Callable[..., int],
    rounds: int,
    what: str,
    *,
    has_ranks: bool = True,
    has_starts: bool = True,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benches.add_parser(
        name,
        help=what,
        description=what,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if has_ranks:
        parser.add_argument(
            "--ranks", type=_at_least(2), default=2, metavar="N", help="processes (default 2)"
        )
    else:
        parser.set_defaults(ranks=1)
    parser.add_argument(
        "--rounds", type=_at_least(1), default=rounds, metavar="N", help=f"samples of each (default {rounds})"
    )
    parser.add_argument("--only", type=_names, default=(), metavar="A,B", help="contenders (default: all)")
    parser.add_argument(
        "--before",
        default="",
        metavar="PYTHON",
        help="interpreter of an installation with another version of Paceline, to measure in the same rounds",
    )
    if has_starts:
        parser.add_argument(
            "--starts",
            type=_at_least(1),
            default=1,
            metavar="N",
            help="start all processes anew N times, and divide the rounds among the starts (default 1)",
        )
    else:
        parser.set_defaults(starts=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table and how it was made")
    parser.set_defaults(func=functools.partial(_guarded, run))
    return parser


def _add_all_reduce(benches: Any) -> None:
    parser = _add(benches, "all_reduce", _all_reduce, 30, "time of one all_reduce, by size")
    parser.add_argument(
        "--sizes", type=_sizes, default=None, metavar="A,B", help="default 4,16KiB,256KiB,4MiB,25MiB"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")


def _add_step(benches: Any) -> None:
    parser = _add(benches, "step", _step, 30, "what data parallelism adds to a training step")
    parser.add_argument(
        "--framework", choices=("torch", "paddle"), default="torch", help="whose models (default torch)"
    )
    parser.add_argument(
        "--models",
        type=_names,
        default=(),
        metavar="A,B",
        help="of toy,rl,mlp,gpt,cnn, or with paddle toy,rl,deep,mlp (default: all)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")
    parser.add_argument(
        "--system-malloc", action="store_true", help="leave malloc as it is (default: it keeps freed memory)"
    )


def _add_killed(benches: Any) -> None:
    parser = _add(
        benches,
        "killed",
        _killed,
        5,
        "time from SIGKILL of a rank until all survivors have raised",
        has_starts=False,
    )
    parser.add_argument(
        "--resident",
        type=_at_least(0),
        default=1024,
        metavar="MIB",
        help="memory it holds (default 1024)",
    )


def _add_memory(benches: Any) -> None:
    what = "memory that gradients and their buckets take, or a whole training with Adam"
    parser = _add(benches, "memory", _memory, 5, what, has_starts=False)
    parser.add_argument(
        "--of",
        choices=("gradients", "training"),
        default="gradients",
        help="gradients above the bare model (default), or parameters, gradients and Adam's state",
    )


def _add_trace(benches: Any) -> None:
    what = "what recording its passes adds to a training step"
    parser = _add(benches, "trace", _trace, 200, what, has_starts=False)
    what = "of toy,rl,mlp,gpt,cnn (default: all)"
    parser.add_argument("--models", type=_names, default=(), metavar="A,B", help=what)
    parser.add_argument(
        "--sample-s",
        type=_seconds,
        default=0.03,
        metavar="S",
        help="length of a sample (default 0.03: many short ones tell small differences from noise)",
    )


def _add_optimizer(benches: Any) -> None:
    what = "an optimizer's step of which each rank makes a part, against all of it on each"
    parser = _add(benches, "optimizer", _optimizer, 15, what)
    parser.add_argument(
        "--parameters",
        type=_at_least(1),
        default=50,
        metavar="M",
        help="millions of them (default 50); each takes some 200 bytes of memory in all",
    )


def _add_throughput(benches: Any) -> None:
    what = "samples per second of the same batch, by one process with all cores and by several ranks"
    parser = _add(benches, "throughput", _throughput, 15, what)
    parser.add_argument(
        "--models",
        type=_names,
        default=(),
        metavar="A,B",
        help="of rl,gru,gpt,cnn,mlp-2m,mlp-4m (default: all, which takes some minutes)",
    )


def _add_data(benches: Any) -> None:
    parser = _add(
        benches,
        "data",
        _data,
        5,
        "how fast indices come, against torch's DistributedSampler",
        has_ranks=False,
    )
    parser.add_argument(
        "--length",
        type=_at_least(1000),
        default=10**8,
        metavar="N",
        help="samples of the largest data set (default 10^8, of which torch's makes 5 GB)",
    )


def _add_predict(benches: Any) -> None:
    what = "compute how long averaging over several hosts will take; nothing is measured"
    parser = benches.add_parser("predict", help=what, description=what)
    parser.add_argument(
        "--gradients", type=_size, default=100 << 20, metavar="SIZE", help="of one rank (default 100MiB)"
    )
    parser.add_argument(
        "--hosts",
        type=_numbers(2, _MOST_HOSTS),
        default=(2, 8, 64, 1024),
        metavar="A,B",
        help="default 2,8,64,1024",
    )
    parser.add_argument(
        "--ranks", type=_at_least(1), default=8, metavar="N", help="ranks on each host (default 8)"
    )
    parser.add_argument(
        "--rates", type=_rates, default=(1.0, 10.0, 100.0), metavar="A,B", help="Gbit/s (default 1,10,100)"
    )
    parser.add_argument(
        "--step-ms",
        type=_milliseconds,
        metavar="T",
        help="a training step without averaging: says what is left of the throughput",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the values")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")
    parser.set_defaults(func=functools.partial(_guarded, _predict))


def _all_reduce(arguments: argparse.Namespace) -> int:
    from paceline.bench import all_reduce, plot

    report = all_reduce.run(_plan(arguments, all_reduce.ENTRIES), arguments.sizes or all_reduce.SIZES)
    return _finish(report, arguments, plot.draw_all_reduce)


def _step(arguments: argparse.Namespace) -> int:
    from paceline.bench import plot, step

    framework, models = arguments.framework, step.MODELS[arguments.framework]
    _check_names("--models", arguments.models, models)
    environment = {} if arguments.system_malloc else step.STEADY_MALLOC
    plan = _plan(arguments, step.ENTRIES[framework], environment)
    report = step.run(plan, arguments.models or models, framework)
    return _finish(report, arguments, plot.draw_step)


def _killed(arguments: argparse.Namespace) -> int:
    from paceline.bench import killed

    return _finish(killed.run(_plan(arguments, killed.ENTRIES), arguments.resident), arguments)


def _memory(arguments: argparse.Namespace) -> int:
    from paceline.bench import memory, training_memory

    bench = memory if arguments.of == "gradients" else training_memory
    return _finish(bench.run(_plan(arguments, bench.ENTRIES)), arguments)


def _features(arguments: argparse.Namespace) -> int:
    from paceline.bench import features, step

    return _finish(features.run(_plan(arguments, features.ENTRIES, step.STEADY_MALLOC)), arguments)


def _trace(arguments: argparse.Namespace) -> int:
    from paceline.bench import step, trace

    _check_names("--models", arguments.models, trace.MODELS)
    plan = _plan(arguments, trace.ENTRIES, step.STEADY_MALLOC)
    return _finish(trace.run(plan, arguments.models or trace.MODELS, arguments.sample_s), arguments)


def _hook(arguments: argparse.Namespace) -> int:
    from paceline.bench import hook, step

    return _finish(hook.run(_plan(arguments, hook.ENTRIES, step.STEADY_MALLOC)), arguments)


def _optimizer(arguments: argparse.Namespace) -> int:
    from paceline.bench import optimizer

    plan = _plan(arguments, optimizer.ENTRIES)
    return _finish(optimizer.run(plan, arguments.parameters * 1_000_000), arguments)


def _throughput(arguments: argparse.Namespace) -> int:
    from paceline.bench import throughput

    _check_names("--models", arguments.models, list(throughput.MODELS))
    plan = _plan(arguments, throughput.entries(arguments.ranks), throughput.ENVIRONMENT)
    return _finish(throughput.run(plan, arguments.models or list(throughput.MODELS)), arguments)


def _data(arguments: argparse.Namespace) -> int:
    from paceline.bench import data

    return _finish(data.run(_plan(arguments, data.ENTRIES), arguments.length), arguments)


def _start(arguments: argparse.Namespace) -> int:
    from paceline.bench import start

    return _finish(start.run(_plan(arguments, start.ENTRIES)), arguments)


def _predict(arguments: argparse.Namespace) -> int:
    from paceline.bench import plot, predict

    report = predict.run(
        arguments.gradients,
        arguments.hosts,
        arguments.ranks,
        arguments.rates,
        "paceline " + shlex.join(sys.argv[1:]),
        None if arguments.step_ms is None else arguments.step_ms / 1e3,
    )
    return _finish(report, arguments, plot.draw_predict)


Draw = Callable[["Report", Path], None]


def _finish(report: Report, arguments: argparse.Namespace, draw: Draw | None = None) -> int:
    report.show()
    if arguments.json:
        report.write_json(arguments.json)
    if arguments.markdown:
        print(f"written: {report.write_markdown(arguments.markdown)}")
    if draw is not None and arguments.plot and report.data["rows"]:
        draw(report, arguments.plot)
    return 0 if report.is_complete else 1


def _guarded(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a bench; what the user can put right ends with one message and exit status 2."""
    try:
        _check_outputs(arguments)
        return run(arguments)
    except ConfigError as error:
        print(f"paceline bench: {error}", file=sys.stderr)
        return 2


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Before the minutes of measuring, not after them."""
    for option in ("json", "markdown", "plot"):
        path: Path | None = getattr(arguments, option, None)
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"--{option} {path}: there is no folder {path.parent}")
    if getattr(arguments, "plot", None) and not importlib.util.find_spec("matplotlib"):
        raise ConfigError("--plot needs matplotlib", hint="pip install 'paceline[bench]'")


def _plan(
    arguments: argparse.Namespace, entries: Sequence[Entry], environment: Mapping[str, str] | None = None
) -> Plan:
    from paceline.bench.contest import Installation, Plan, status_line

    _check_names("--only", arguments.only, [entry.key for entry in entries])
    command = "paceline " + shlex.join(sys.argv[1:])
    if arguments.before and shutil.which(arguments.before) is None:
        raise ConfigError(
            f"--before {arguments.before}: there is no such program.",
            hint="a Python interpreter, .venv-before/bin/python say",
        )
    return Plan(
        arguments.ranks,
        arguments.rounds,
        arguments.only,
        command,
        status_line,
        environment or {},
        Installation.of(arguments.before) if arguments.before else None,
        arguments.starts,
    )


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{option}: unknown {', '.join(unknown)}", expected=", ".join(known))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _size(text: str) -> int:
    (size,) = _sizes(text) if "," not in text else (0,)
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not one size; write 100MiB")
    return size


def _numbers(least: int, most: int) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        numbers = tuple(_at_least(least)(part) for part in _names(text) or (text,))
        if max(numbers) > most:
            raise argparse.ArgumentTypeError(f"{max(numbers)} is more than {most}")
        return numbers

    return parse


def _rates(text: str) -> tuple[float, ...]:
    return tuple(_positive(part, "Gbit/s, for example 1,10,0.1") for part in _names(text) or (text,))


def _milliseconds(text: str) -> float:
    return _positive(text, "milliseconds, for example 250")


def _seconds(text: str) -> float:
    return _positive(text, "seconds, for example 0.5")


def _positive(text: str, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {expected}")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    from paceline.bench.units import parse_size

    try:
        return tuple(parse_size(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse
