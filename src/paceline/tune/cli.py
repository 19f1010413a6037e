"""`paceline tune`: its arguments, the checks before anything starts, and the answer."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.arguments import Arguments
from paceline.errors import ConfigError
from paceline.launch import cli as run_cli
from paceline.launch import tune_answers
from paceline.launch.plan import MAX_NPROCS
from paceline.launch.topology import read_machine, read_processor
from paceline.launch.tune_answers import Layout, Place, Tuned
from paceline.tune import answer_text, layouts
from paceline.tune.compare import Verdict, judge
from paceline.tune.measure import Measured, Task, measure

_USAGE = """paceline tune [options] script.py [arguments ...]
       paceline tune [options] -m module [arguments ...]"""
_EPILOG = """\
examples:
  paceline tune train.py --lr 0.1              one rank with all cores, ..., one rank per core
  paceline tune --ranks 1,4 --seconds 180 train.py
  paceline tune train.py --batch '{256/ranks}'   256 samples in each step, whatever the ranks
  paceline run -n auto train.py --lr 0.1       then uses the answer

The script really runs, once for each layout, until it is stopped, so files that it writes in its first minute
are written. It must wrap its model in Paceline's class, or be given --replace-ddp. PACELINE_TUNE is set for
it. The exit status is 0 if layouts could be compared, 1 if not.
"""
_STOPPED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. The command of the user is not parsed here: `split_command` cuts it off."""
    parser.usage = _USAGE
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("-m", dest="is_module", action="store_true", help="run a module, as python -m; the last option")
    add(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="the longest time to measure, starts included (default: %(default)g)",
    )
    add("--ranks", metavar="A,B", help="numbers of ranks to compare (default: from 1 to one per core)")
    add("--replace-ddp", nargs="?", const="1", metavar="sampler", help="as in `paceline run`")
    add("--bind", choices=("auto", "cores", "none"), default="auto", help="as in `paceline run`")
    add("--output", type=Path, metavar="FILE.png", help="draw the answer (needs matplotlib)")
    add("--json", type=Path, metavar="FILE", help="write the answer with every measurement")


def main(arguments: Sequence[str]) -> int:
    """Measure a script, report the fastest layout, and store it for `paceline run -n auto`.

    Raises:
        ConfigError: The options or the command are wrong; nothing was started.
    """
    options, command = run_cli.split_command(arguments, add_arguments)
    parser = argparse.ArgumentParser(prog="paceline tune", allow_abbrev=False)
    add_arguments(parser)
    parsed = parser.parse_args(options)
    run_cli.check_command(command, is_module=parsed.is_module, name="tune")
    num_cores = read_machine().num_cores
    Arguments("").seconds("seconds", parsed.seconds, is_finite=True)
    chosen = _layouts(parsed.ranks, num_cores)
    run_options = _run_options(parsed)
    _check_files(parsed.output, parsed.json)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="paceline-tune-") as folder:
        task = Task(
            layouts.in_order_of_start(chosen),
            [*run_options, *(["-m"] if parsed.is_module else [])],
            command,
            parsed.seconds,
            Path(folder),
            os.environ,
        )
        try:
            found = measure(task, _line_on_terminal())
        except KeyboardInterrupt:
            print("\npaceline: stopped; no rank is left", file=sys.stderr)
            return _STOPPED
    verdict = judge(found.standings)
    if verdict is None:
        _say_why_nothing(found, parsed.seconds)
        return 1
    # If only one of several layouts was measured, nothing was compared, so there is no answer.
    is_answer = len(verdict.results) >= min(2, len(found.standings))
    lines = answer_text.sentences(verdict, found.standings, num_cores, load)
    reservation = answer_text.busy_before(num_cores, load)
    _answer(verdict, found, parsed, command, num_cores, lines, reservation, is_answer=is_answer)
    return 0 if is_answer else 1


def _layouts(ranks: str | None, num_cores: int) -> list[Layout]:
    if ranks is None:
        return layouts.layouts_of(num_cores, MAX_NPROCS)
    numbers = sorted({int(word) for word in ranks.split(",") if word.strip().isdigit()})
    most = min(num_cores, MAX_NPROCS)
    if not numbers or len(numbers) != len(ranks.split(",")) or not 1 <= numbers[0] <= numbers[-1] <= most:
        raise ConfigError(
            f"--ranks {ranks} is not usable.",
            expected=f"different numbers from 1 to {most}: more ranks than cores are never faster",
            got=repr(ranks),
            hint=f"--ranks 1,{most}",
        )
    return layouts.with_ranks(numbers, num_cores)


def _run_options(parsed: argparse.Namespace) -> list[str]:
    """The options that are passed on to `paceline run`."""
    run_cli.environment_of_ranks(parsed.replace_ddp)  # raises if the value is wrong
    options = [] if parsed.bind == "auto" else ["--bind", parsed.bind]
    if parsed.replace_ddp is not None:
        options.append(
            "--replace-ddp" if parsed.replace_ddp == "1" else f"--replace-ddp={parsed.replace_ddp}"
        )
    return options


def _check_files(*paths: Path | None) -> None:
    """Check, before the measurement, that the picture (the first path) can be drawn and the files be written.

    Raises:
        ConfigError: They can't.
    """
    picture = paths[0]
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--output needs matplotlib, which is not installed.", hint="`pip install matplotlib`"
        )
    for path in filter(None, paths):
        is_new = not path.exists()
        try:
            with path.open("ab"):
                pass
            if is_new:
                path.unlink()
        except OSError as error:
            raise ConfigError(
                f"{path} can't be written.",
                seen=error.strerror or str(error),
                hint="a file in a folder that exists and that you may write to",
            ) from error


def _line_on_terminal() -> Callable[[str], None]:
    """A function that shows the progress: on a terminal in one line, elsewhere only the starts of layouts."""
    if not sys.stderr.isatty():
        return lambda text: None if text.startswith("round") else print(f"paceline: {text}", file=sys.stderr)
    return lambda text: print(f"\r\033[Kpaceline: {text}"[:100], end="", file=sys.stderr, flush=True)


def _clear_line() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _say_why_nothing(found: Measured, seconds: float) -> None:
    """Report why no layout could be measured."""
    _clear_line()
    if found.output:
        print(found.output, file=sys.stderr)
    failed = any(each.out.startswith("failed") for each in found.standings)
    error = ConfigError(
        "No layout could be measured.",
        seen="\n".join(f"{each.layout}: {each.out}" for each in found.standings if each.out),
        likely="the script itself fails; the end of its output stands above"
        if failed
        else "the script wraps no model in Paceline's class, or needs longer to come to its first step",
        hint="`paceline run` shows its whole output"
        if failed
        else f"wrap the model, or pass --replace-ddp; --seconds {2 * seconds:g} gives it longer",
    )
    print(f"paceline tune: {error}", file=sys.stderr)


def _answer(
    verdict: Verdict,
    found: Measured,
    parsed: argparse.Namespace,
    command: Sequence[str],
    num_cores: int,
    lines: list[str],
    reservation: str,
    *,
    is_answer: bool,
) -> None:
    """Show the table, the sentences and the picture, and store the answer if it is certain."""
    _clear_line()
    script = tune_answers.name_of_script(command, is_module=parsed.is_module)
    best = verdict.result(verdict.recommended)
    assert best is not None
    kept = Tuned(
        layout=verdict.recommended,
        place=Place(read_processor(), num_cores),
        script=script,
        arguments=tuple(command[1:]),
        time_s=time.time(),
        gain=best.of_one.median if best.of_one is not None else None,
        reservation=reservation,
    )
    whole = [
        *_run_options(parsed),
        *(["-m"] if parsed.is_module else []),
        *_filled(command, kept.layout.ranks),
    ]
    ranks = ["-n", str(kept.layout.ranks), "--threads", str(kept.layout.threads)]
    lines.append(f"Use it with:  {shlex.join(['paceline', 'run', *ranks, *whole])}")
    if is_answer:
        lines.append("Nothing is stored for `paceline run -n auto`." if verdict.unsure else _keep(kept))
    title = f"{command[0]}: {verdict.unit} per second by layout, measured in {found.took_s:.0f} s"
    answer_text.show(title, verdict.unit, answer_text.rows(verdict, found.standings), lines)
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(_as_json(verdict, found, kept), indent=1) + "\n")
    if parsed.output is not None:
        cores = tune_answers.counted(num_cores, "core")
        machine = f"{read_processor()}, {cores} usable; {time.strftime('%Y-%m-%d')}"
        answer_text.draw(verdict, f"{Path(command[0]).name} on {cores}", machine, parsed.output)


def _keep(answer: Tuned) -> str:
    """Store the answer; returns a line that reports this to the user."""
    try:
        tune_answers.keep(answer, os.environ)
    except OSError as error:
        return f"The answer could not be stored for `paceline run -n auto`: {error}"
    return "or with:      paceline run -n auto ..., which uses this answer on this machine"


def _filled(command: Sequence[str], ranks: int) -> list[str]:
    return tune_answers.fill_in(command, ranks) or list(command)


def _as_json(verdict: Verdict, found: Measured, kept: Tuned) -> dict[str, Any]:
    return {
        "answer": asdict(kept),
        "fastest": asdict(verdict.fastest),
        "unit": verdict.unit,
        "seconds": found.took_s,
        "results": [asdict(each) for each in verdict.results],
        "turns": [
            {
                "layout": asdict(each.layout),
                "out": each.out,
                "turns": [turn and asdict(turn) for turn in each.known],
            }
            for each in found.standings
        ],
    }
