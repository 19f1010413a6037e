"""`paceline run`: its arguments, and the checks before anything starts."""

from __future__ import annotations

import argparse
import difflib
import importlib.machinery
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from paceline.errors import ConfigError
from paceline.launch import tune_answers
from paceline.launch.elastic import Elastic, run_elastic
from paceline.launch.guardian import run_guarded
from paceline.launch.job_secret import with_secret
from paceline.launch.output import say
from paceline.launch.placement import threads_per_rank
from paceline.launch.plan import Options, make_plan
from paceline.launch.rank_process import interpreter, open_missing_streams
from paceline.launch.topology import read_machine, read_processor
from paceline.launch.tune_answers import Place
from paceline.rendezvous.secret import users_secret
from paceline.replace_class import VARIABLE, check_value

_AUTO = "auto"
_STARTUP = Path(__file__).with_name("startup")
"""Contains the module that Python imports when it starts a rank of `--replace-ddp`."""
_NPROCS = ("-n", "--nprocs", "-np", "--nproc-per-node", "--nproc_per_node")  # also mpirun's and torchrun's
_USAGE = """paceline run [options] script.py [arguments ...]
       paceline run [options] -m module [arguments ...]"""
_EPILOG = """\
examples:
  paceline run -n 4 train.py --lr 0.1         four ranks of one script
  paceline run -n 2 -m package.train          a module, as python -m
  paceline run -n 4 --log-dir logs train.py   also each rank's output in logs/rankN.log
  paceline run --nnodes 2 --rdzv node0:29400 -n 4 train.py   on each of two hosts: eight ranks

Every rank gets the variables of torchrun and of paddle.distributed.launch. When a rank fails the others are
stopped, and the first failure is shown last. SIGTERM, SIGUSR1 and SIGUSR2 are passed on to the ranks. The
exit status is that of the first rank to fail, 128 + signal if a signal killed it; 124 after --timeout-s or
--exit-timeout-s; 75 if all ranks end with it, which says that the job can be resumed; else 143 after SIGTERM,
and 130 after Ctrl-C (a second Ctrl-C kills at once).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; `split_command` has cut off the command before."""
    parser.usage = _USAGE
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        *_NPROCS,
        dest="nprocs",
        metavar="N",
        help="number of ranks (default: one per core); auto: what `paceline tune` has found to be fastest",
    )
    add("-m", dest="is_module", action="store_true", help="run a module, as python -m; ends the options")
    add("--master-addr", default="127.0.0.1", metavar="HOST", help="address of rank 0 (default: %(default)s)")
    add("--master-port", type=int, metavar="PORT", help="port of rank 0 (default: a free one)")
    add(
        "--threads",
        type=int,
        metavar="N",
        help="OMP_NUM_THREADS of each rank (default: as set, else cores divided by ranks)",
    )
    add(
        "--bind",
        choices=("auto", "cores", "none"),
        default="auto",
        help="cores: each rank runs only on cores of its own; auto (the default): the same if there are "
        "enough, else on one NUMA node, if there are several",
    )
    add(
        "--prefix",
        choices=("auto", "always", "never"),
        default="auto",
        help="[rank N] before each line; auto (the default): not for a single rank, nor for rank 0 on a "
        "terminal, so that its progress bars work",
    )
    add(
        "--replace-ddp",
        nargs="?",
        const="1",
        metavar="sampler",
        help="replace torch's DistributedDataParallel and DataParallel, and paddle.DataParallel, with "
        "Paceline's in the script and in every library that it uses; --replace-ddp=sampler: samplers, too",
    )
    add("--log-dir", metavar="DIR", help="write each rank's output to DIR/rankN.log too")
    add(
        "--trace",
        metavar="FILE",
        help="write a timeline of all ranks for ui.perfetto.dev: forward, backward, which rank waits for "
        "which; with --nnodes one on each host, with its name",
    )
    add(
        "--dashboard",
        nargs="?",
        const="0",
        metavar="PORT",
        help="serve a page about the running job on this machine, at the address that is printed; "
        "--dashboard=8080: on that port. With --nnodes on each host; that of rank 0 shows all ranks",
    )
    add("--timeout-s", type=float, metavar="S", help="stop the job after S seconds")
    add(
        "--nnodes",
        type=int,
        metavar="N",
        help="number of hosts, joined by torch's elastic agent; same command on each, which starts -n ranks",
    )
    add(
        "--rdzv",
        metavar="HOST:PORT",
        help="rendezvous address: one of the hosts, and a free port of it; for two shells of one "
        "machine localhost:29400",
    )
    add(
        "--node-rank",
        type=int,
        metavar="N",
        help="index of this host; host 0 is the one at --rdzv (default: the hosts agree among themselves)",
    )
    add(
        "--rdzv-timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="how long to wait for the other hosts (default: %(default)g)",
    )
    add(
        "--grace-s",
        type=float,
        default=5.0,
        metavar="S",
        help="after a failure: seconds until SIGTERM, then until SIGKILL (default: %(default)g)",
    )
    add(
        "--preempt-s",
        type=float,
        default=Options.preempt_s,
        metavar="S",
        help="after a SIGTERM, which schedulers send before they take the machine: seconds until SIGKILL "
        "(default: %(default)g)",
    )
    add(
        "--exit-timeout-s",
        type=float,
        default=Options.exit_timeout_s,
        metavar="S",
        help="stop the last ranks when all others have ended and they have used no processor for S seconds "
        "(default: %(default)g)",
    )


def split_command(
    arguments: Sequence[str], declare: Callable[[argparse.ArgumentParser], None] = add_arguments
) -> tuple[list[str], list[str]]:
    """Separate the launcher's options from the command that follows them.

    Args:
        arguments: The whole command line.
        declare: Declares the options; by default those of `paceline run`.

    Raises:
        ConfigError: There is no such option.

    Example:
        ["-n", "2", "train.py", "-n", "7"] -> (["-n", "2"], ["train.py", "-n", "7"])
    """
    parser = argparse.ArgumentParser(add_help=False)
    declare(parser)
    takes_value = {
        name for action in parser._actions if action.nargs is None for name in action.option_strings
    }
    known = {"-h", "--help", *parser._option_string_actions}
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        if arguments[index] == "--":
            return list(arguments[:index]), list(arguments[index + 1 :])
        if arguments[index] == "-m":
            rest = list(arguments[index + 1 :])
            return list(arguments[: index + 1]), rest[1:] if rest[:1] == ["--"] else rest
        _check_option(arguments[index], known)
        index += 2 if arguments[index] in takes_value else 1
    return list(arguments[:index]), list(arguments[index:])


def _check_option(word: str, known: Collection[str]) -> None:
    """Raise unless the word begins with an option. Unlike argparse, the error suggests the right option."""
    name = word.partition("=")[0]
    # "-n2" is -n with its value; "-nnodes" is --nnodes with a dash missing, since "nodes" is no value.
    is_short = word[:2] in known and not word.startswith("--") and f"-{name}" not in known
    if name in known or is_short:
        return
    close = difflib.get_close_matches(f"--{name.lstrip('-')}", sorted(known), n=1, cutoff=0.75)
    raise ConfigError(
        f"There is no option {name}.",
        hint=f"did you mean {close[0]}?" if close else "--help lists the options",
        option=name,
    )


def main(parsed: argparse.Namespace, command: Sequence[str]) -> int:
    """Run a command on several ranks.

    Args:
        parsed: The options.
        command: The script or module and its arguments.

    Returns:
        The exit status of the job.

    Raises:
        ConfigError: The options or the command are invalid; nothing was started.
    """
    open_missing_streams()
    check_command(command, is_module=parsed.is_module)
    if parsed.nprocs is None and (given := _nprocs_behind(command)):
        say(
            f"paceline: `{given}` stands after {command[0]}, so it is an argument of the script, and there "
            f"is one rank per core. Options of `paceline run` come before it: "
            f"`paceline run {given} {command[0]}`"
        )
    if (parsed.nnodes, parsed.rdzv, parsed.node_rank) != (None, None, None):
        _run_on_hosts(parsed, command)
    environment = environment_of_ranks(parsed.replace_ddp)
    if parsed.nprocs == _AUTO:
        command = _use_answer(parsed, command)
    plan = make_plan(
        " ".join(command[:1]),
        (*interpreter(), *(("-m",) if parsed.is_module else ()), *command),
        Options(
            nprocs=_parse_nprocs(parsed.nprocs),
            master_addr=parsed.master_addr,
            master_port=parsed.master_port,
            threads=parsed.threads,
            bind=parsed.bind,
            prefix=parsed.prefix,
            log_dir=parsed.log_dir,
            timeout_s=parsed.timeout_s,
            grace_s=parsed.grace_s,
            preempt_s=parsed.preempt_s,
            exit_timeout_s=parsed.exit_timeout_s,
            trace=parsed.trace,
            dashboard=parsed.dashboard,
        ),
        inherited=environment,
        script=None if parsed.is_module else command,
    )
    return run_guarded(with_secret(plan, environment))


def _nprocs_behind(command: Sequence[str]) -> str:
    """A number of ranks that was probably given to the script by mistake; "" if there is none.

    Example:
        ["train.py", "-n", "2"] -> "-n 2"
    """
    for word, value in itertools.pairwise([*command[1:], ""]):
        name, equals, attached = word.partition("=")
        number = attached if equals else value
        if name in _NPROCS and (number.isdecimal() or number == _AUTO):
            return word if equals else f"{word} {value}"
    return ""


def _use_answer(parsed: argparse.Namespace, command: Sequence[str]) -> Sequence[str]:
    """Set ranks and threads from the last answer of `paceline tune`, and print them; returns the command.

    Raises:
        ConfigError: There is no answer for this script on this machine, or its arguments can't be divided.
    """
    place = Place(read_processor(), read_machine().num_cores)
    script = tune_answers.name_of_script(command, is_module=parsed.is_module)
    options = ["--replace-ddp"] if parsed.replace_ddp is not None else []
    again = tune_answers.tune_command([*options, *(["-m"] if parsed.is_module else [])], command)
    answer = tune_answers.find(script, place, os.environ, again)
    parsed.nprocs = str(answer.layout.ranks)
    parsed.threads = parsed.threads or answer.layout.threads
    filled = tune_answers.fill_in(command, answer.layout.ranks)
    if filled is None:
        raise ConfigError(
            f"An argument of the script can't be divided by {answer.layout.ranks} ranks.",
            got=" ".join(command[1:]),
            hint=f"`{again}` with a number that can be",
        )
    others = "" if answer.arguments == tuple(command[1:]) else "; it was measured with other arguments: "
    with_others = (others + (" ".join(answer.arguments) or "none")) if others else ""
    gain = f", {answer.gain:.2f}x of one rank" if answer.gain is not None and answer.layout.ranks > 1 else ""
    doubt = f"; not sure: {answer.reservation}; `{again}` measures again" if answer.reservation else ""
    say(f"paceline: -n auto: {answer.layout}{gain}, by `paceline tune` of {answer.date}{with_others}{doubt}")
    return filled


def _run_on_hosts(parsed: argparse.Namespace, command: Sequence[str]) -> NoReturn:
    """Run torch's agent for this host.

    Raises:
        ConfigError: An option is missing, or is only for a launch on one host.
    """
    missing = [name for name in ("nnodes", "rdzv") if getattr(parsed, name) is None]
    alone = argparse.ArgumentParser(add_help=False)
    add_arguments(alone)
    addresses = ("master_addr", "master_port")
    of_one_host = (*addresses, "bind", "prefix", "timeout_s", "grace_s", "preempt_s", "exit_timeout_s")
    given = [name for name in of_one_host if getattr(parsed, name) != alone.get_default(name)]
    is_address = not set(given).isdisjoint(addresses)
    if parsed.nprocs == _AUTO:
        raise ConfigError(
            "-n auto is for a launch on one host only.",
            likely="`paceline tune` measures one host; with several, another number may be faster",
            hint="-n N, the same on each host; without it, there is one rank per core",
        )
    spelled = ", ".join(f"--{name.replace('_', '-')}" for name in missing or given)
    if missing:
        raise ConfigError(
            f"{spelled} is missing for a launch on several hosts.",
            expected="--nnodes N and --rdzv HOST:PORT, the same on each host",
            hint="paceline run --nnodes 2 --rdzv node0:29400 -n 4 train.py",
        )
    if given:
        raise ConfigError(
            f"{spelled} {'is' if len(given) == 1 else 'are'} for a launch on one host only.",
            hint=f"leave {spelled} out" + ("; --rdzv says where the hosts meet" if is_address else ""),
        )
    cores = read_machine().num_cores
    nprocs = _parse_nprocs(parsed.nprocs) or cores
    elastic = Elastic(
        nnodes=parsed.nnodes,
        rdzv=parsed.rdzv,
        nprocs=nprocs,
        timeout_s=parsed.rdzv_timeout_s,
        log_dir=parsed.log_dir,
        threads=parsed.threads or threads_per_rank(cores, max(nprocs, 1)),
        trace=parsed.trace,
        dashboard=parsed.dashboard,
        node_rank=parsed.node_rank,
    )
    environment = dict(environment_of_ranks(parsed.replace_ddp))
    users_secret(environment)  # raises here, before the ranks of all hosts are started
    if parsed.threads is not None:
        environment["OMP_NUM_THREADS"] = str(parsed.threads)
    run_elastic(elastic, (*(("-m",) if parsed.is_module else ()), *command), environment)


def check_command(command: Sequence[str], *, is_module: bool, name: str = "run") -> None:
    """Raise unless python would find the script or module.

    Args:
        command: The script or module and its arguments.
        is_module: Whether it is a module.
        name: The subcommand of `paceline` that was called.

    Raises:
        ConfigError: Python would not find it; the message says what is there instead.
    """
    if not command:
        what = "module" if is_module else "script"
        usage = _USAGE.replace("paceline run", f"paceline {name}")
        raise ConfigError(
            f"No {what} to run.", expected=usage, hint=f"`paceline {name} --help` shows examples"
        )
    is_file = Path(command[0]).exists()
    if is_module:
        top = command[0].split(".")[0]
        if _find_module(top) is None or (is_file and command[0].endswith(".py")):
            raise ConfigError(
                f"There is no module {command[0]!r}.",
                where=f"the current folder, {Path.cwd()}, and the path of {sys.executable}",
                hint="it is a file: leave -m out" if is_file else "",
                module=command[0],
            )
    elif not is_file:
        raise ConfigError(
            f"There is no script {command[0]!r}.",
            where=f"the current folder, {Path.cwd()}",
            hint=_script_hint(command),
            script=command[0],
        )


def _find_module(name: str) -> object | None:
    return importlib.machinery.PathFinder.find_spec(name, [os.getcwd(), *sys.path])


def _script_hint(command: Sequence[str]) -> str:
    name = command[0]
    if re.fullmatch(r"python[\d.]*", Path(name).name):
        rest = " ".join(command[1:]) or "script.py"
        return f"`paceline run` starts python itself: `paceline run {rest}`"
    if _find_module(name.split(".")[0]) is not None and not name.endswith(".py"):
        return f"a module? `paceline run -m {name}`"
    folder = Path(name).parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(Path(name).name, names, n=1)
    return f"did you mean {folder / close[0]}?" if close else ""


def environment_of_ranks(replace_ddp: str | None) -> Mapping[str, str]:
    """The environment that the ranks inherit.

    Raises:
        ConfigError: --replace-ddp would have no effect.
    """
    if replace_ddp is None:
        return os.environ
    check_value("--replace-ddp", replace_ddp)
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ConfigError(
            "--replace-ddp does nothing here: Python reads no PYTHONPATH when it starts a rank.",
            likely=f"this Python was started with -E, -I or -S: {shlex.join(interpreter())}",
            hint="leave these options out, or call paceline.torch.replace_ddp() in the script",
        )
    if not _is_installed():
        raise ConfigError(
            "--replace-ddp does nothing here: the ranks would not find paceline when they start.",
            expected=f"paceline installed for {sys.executable}",
            likely=f"it is imported from its source, {Path(__file__).parents[1]}",
            hint="install it (`pip install .`), or call paceline.torch.replace_ddp() in the script",
        )
    paths = filter(None, (str(_STARTUP), os.environ.get("PYTHONPATH")))
    return {**os.environ, VARIABLE: replace_ddp, "PYTHONPATH": os.pathsep.join(paths)}


def _is_installed() -> bool:
    from importlib import metadata  # imports many modules, and is needed for --replace-ddp only

    try:
        metadata.distribution("paceline")
    except metadata.PackageNotFoundError:
        return False
    return True


def _parse_nprocs(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"-n {text} is not a number of ranks.",
            expected="a number, or auto: the last answer of `paceline tune`",
            got=repr(text),
        ) from None
