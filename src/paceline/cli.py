"""The `paceline` command.

Each subcommand's module is imported only when the subcommand is used.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from paceline import __version__
from paceline.errors import PacelineError

_DESCRIPTION = "Data-parallel training on all cores of a machine, and beyond."


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    if name == "run" or sys.stdout is None:  # the launcher goes on without a reader
        return _call(name, arguments)
    try:
        try:
            return _call(name, arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has gone, as `head` does. The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _call(name: str, arguments: Sequence[str]) -> int:
    try:
        if name in _COMMANDS:
            return _COMMANDS[name](arguments[1:])
        return _no_command(arguments)
    except PacelineError as error:
        print(f"paceline {name}: {_printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _printable(text: str) -> str:
    from paceline.trace.ring_file import printable

    return printable(text, "\n\t")


def _run(arguments: Sequence[str]) -> int:
    # Schedulers send these signals as a warning, and they would end this process. They stay blocked until the
    # launcher can pass them on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    from paceline.launch import cli

    try:
        options, command = cli.split_command(arguments)
        parser = argparse.ArgumentParser(prog="paceline run", allow_abbrev=False)
        cli.add_arguments(parser)
        return cli.main(parser.parse_args(options), command)
    finally:  # for programs that call this function, and the processes that they start
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stacks(arguments: Sequence[str]) -> int:
    from paceline import stacks

    parser = argparse.ArgumentParser(
        prog="paceline stacks", description="Show where the Python threads of a process are."
    )
    parser.add_argument("pid", type=int, help="a rank's process id, as errors and reports show it")
    print(_printable(stacks.ask(parser.parse_args(arguments).pid)), end="")
    return 0


def _doctor(arguments: Sequence[str]) -> int:
    from paceline import doctor

    return doctor.main(list(arguments))


def _tune(arguments: Sequence[str]) -> int:
    from paceline.tune import cli

    return cli.main(arguments)


def _trace(arguments: Sequence[str]) -> int:
    from paceline.trace import cli

    return cli.main(arguments)


def _predict(arguments: Sequence[str]) -> int:
    from paceline import predict

    return predict.main(arguments)


def _top(arguments: Sequence[str]) -> int:
    from paceline.monitor import top

    return top.main(arguments)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "predict": _predict,
    "stacks": _stacks,
    "doctor": _doctor,
    "top": _top,
    "trace": _trace,
    "tune": _tune,
}


class _Help(argparse.HelpFormatter):
    """Lists the commands without a line for the group itself, which would only repeat its metavar."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text


def _no_command(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="paceline", description=_DESCRIPTION, formatter_class=_Help)
    parser.add_argument("--version", action="store_true", help="show the version")
    commands = parser.add_subparsers(title="commands", metavar="command")
    commands.add_parser("run", help="start a script on several ranks: paceline run -n 4 train.py")
    commands.add_parser(
        "tune", help="with how many ranks and threads is a script fastest here? paceline tune train.py"
    )
    commands.add_parser(
        "predict",
        help="how much memory will N ranks need, and how long will averaging over hosts take? "
        "paceline predict model.py -n 64",
    )
    commands.add_parser("doctor", help="is this machine fit for training on several ranks?")
    commands.add_parser("top", help="show what the ranks of a job do now: paceline top")
    commands.add_parser(
        "trace", help="show the last backward passes of a job that runs or has failed: paceline trace JOB"
    )
    commands.add_parser("stacks", help="show where a rank's threads are: paceline stacks PID")
    import difflib  # here, so that `run` blocks its signals first

    if arguments and (close := difflib.get_close_matches(arguments[0], _COMMANDS, n=1)):
        parser.error(f"there is no command {arguments[0]!r}; did you mean `paceline {close[0]}`?")
    if parser.parse_args(arguments).version:
        print(f"paceline {__version__}")
        return 0
    parser.print_help(sys.stderr)
    return 2
