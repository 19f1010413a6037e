"""Paceline on Ray: `paceline.ray.run` calls a function on workers of a Ray cluster, which form one job.

    paceline.ray.run(train, num_workers=8, resources={"CPU": 4})

Ray places the workers where there is room, in any order. This module assigns ranks by node, in blocks, and
sets the variables that torchrun would set. It passes the job's secret to the workers as an argument of Ray's
calls, and puts it into no environment. A worker returns the exception of its rank as text, so that the first
failure can be distinguished from its consequences on other ranks.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from paceline.arguments import Arguments
from paceline.errors import ConfigError, LaunchError
from paceline.health.stop_signals import EXIT_STATUS
from paceline.launch.failure_report import (
    RankEnd,
    evidence,
    exception_line,
    first_failure,
    is_consequence,
    others,
)
from paceline.rendezvous.secret import NO_SECRET, JobSecret, adopt_secret, new_secret, users_secret

__all__ = ["run"]

_arguments = Arguments("paceline.ray.run")

# How long to wait for the first failure once a rank has failed because of another one. Ray learns of the end
# of a process from its node, later than the other ranks do.
_CAUSE_WITHIN_S = 10.0

# How a rank ended. These replace the exit status of its process, which Ray does not report. Only _RAISED
# comes with a traceback.
_RAISED, _ENDED, _NOT_SENT = 1, 2, 3


def run(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    *,
    num_workers: int,
    resources: Mapping[str, float] | None = None,
    forming_timeout_s: float | timedelta = 300.0,
) -> list[Any]:
    """Call `fn(*args)` on `num_workers` workers of the Ray cluster, each one rank of a job.

    Ranks are assigned by node, in blocks, so that few bytes cross the network. RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in each worker, so
    `paceline.torch.init_process_group()` works there. Blocks until all workers have returned. When one fails,
    the others are ended. Connects to a cluster with ray.init(), if the program has not done so.

    The ranks authenticate each other by a secret of this job: the secret of this process, if the user has
    named one (PACELINE_SECRET_FILE), else a new one. It is sent in Ray's own calls, which are encrypted only
    if the cluster is set up with RAY_USE_TLS.

    Args:
        fn: The function to call; Ray pickles it.
        args: Its arguments, the same for each rank.
        num_workers: Number of ranks.
        resources: The resources of each worker, by Ray's names: {"CPU": 4, "GPU": 1}; None: one CPU.
        forming_timeout_s: Seconds for the cluster to have room for all workers, and to start them.

    Returns:
        What `fn` returned, by rank.

    Raises:
        ConfigError: Ray is not installed, an argument is wrong, the cluster had no room in time, or the file
            of the user's secret cannot be read.
        LaunchError: A rank raised or died. It names the first rank that did and the address of its node, and
            quotes the traceback; `failures` lists all ranks that failed, that one first.
        SystemExit: With status 75: a signal to a worker has stopped the ranks, and they have saved their step
            (see `paceline.Checkpointer`). The same call resumes.

    Example:
        With two nodes of two free CPUs, `run(train, num_workers=4)` makes ranks 0 and 1 on one node, 2 and 3
        on the other.
    """
    _arguments.function("fn", fn, "fn(*args)")
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise _arguments.refuse(
            "args", args, "the arguments of fn, in a tuple", "args=(1,) for a single one", is_type=True
        )
    count = _arguments.whole("num_workers", num_workers, least=1, hint="num_workers=4")
    bundle = {"CPU": 1.0} if resources is None else _checked_resources(resources)
    deadline = time.monotonic() + _arguments.seconds("forming_timeout_s", forming_timeout_s)
    secret = secret_for_workers(os.environ)
    ray = _ray()
    if not ray.is_initialized():
        ray.init()
    group = ray.util.placement_group([bundle] * count, strategy="PACK")
    workers: list[Any] = []
    try:
        if not group.wait(max(0.0, deadline - time.monotonic())):
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            raise ConfigError(
                f"The Ray cluster has no room for {count} worker{'s' * (count > 1)} "
                f"of {_spell(bundle)}{' each' * (count > 1)}.",
                seen=f"free: {_spell(ray.available_resources())}; in all: {_spell(ray.cluster_resources())}",
                likely=why_no_room(nodes, bundle, count),
                hint="fewer workers, or less for each; `ray status` shows who holds what; "
                "forming_timeout_s waits longer",
            )
        workers = _start_workers(ray, group, bundle, count)
        places = _started(ray, [worker.place.remote() for worker in workers], deadline)
        order = in_blocks([node for node, _ in places])
        ranked = [workers[each] for each in order]
        (port,) = _started(ray, [ranked[0].free_port.remote()], deadline)
        variables = rank_variables([places[each] for each in order], port, os.urandom(16).hex())
        calls = [
            worker.call.remote(own, secret, fn, tuple(args))
            for worker, own in zip(ranked, variables, strict=True)
        ]
        return _results(ray, calls, [places[each][1] for each in order], getattr(fn, "__qualname__", "fn"))
    finally:
        for worker in workers:
            ray.kill(worker)
        ray.util.remove_placement_group(group)


def in_blocks(nodes: Sequence[str]) -> list[int]:
    """An order of the workers that keeps those of a node together, with nodes in the order of `nodes`."""
    first = {node: place for place, node in reversed([*enumerate(nodes)])}
    return sorted(range(len(nodes)), key=lambda place: (first[nodes[place]], place))


def rank_variables(places: Sequence[tuple[str, str]], port: int, job_id: str) -> list[dict[str, str]]:
    """The variables of each rank; `places` holds the node and the address of each."""
    nodes = [node for node, _ in places]
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(nodes[:rank].count(node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
            "MASTER_ADDR": places[0][1],
            "MASTER_PORT": str(port),
            "PACELINE_JOB_ID": job_id,
        }
        for rank, node in enumerate(nodes)
    ]


def why_no_room(nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float], count: int) -> str:
    """The reason why the workers are not placed, as far as the sizes of the nodes show it."""
    for name, amount in bundle.items():
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if most < amount:
            has = f"the largest has {most:g}" if most else "none has any"
            return f"no node has {amount:g} {name} for one worker: {has}"
    # A worker may take a thousandth of a CPU, and rounding in the division would lose one such worker.
    fitting = [min(int(node.get(each, 0.0) / of + 1e-6) for each, of in bundle.items()) for node in nodes]
    if sum(fitting) < count:
        return f"the nodes hold {sum(fitting)} of the {count} workers, if no other process uses them"
    return "other jobs of the cluster hold it"


def secret_for_workers(environ: Mapping[str, str]) -> JobSecret:
    """The user's secret, or a new one for this job."""
    users = users_secret(environ)
    return new_secret("paceline.ray.run") if users is NO_SECRET else users


class _Worker:
    def place(self) -> tuple[str, str]:
        ray = _ray()
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def free_port(self) -> int:
        from paceline.launch.ports import free_ports

        return free_ports(1)[0]

    def call(
        self, variables: Mapping[str, str], secret: JobSecret, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> _Outcome:
        """Call `fn` as a rank. If it raises, the ranks that wait for this one receive the exception."""
        adopt_secret(secret)
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        os.environ.update(variables)
        try:
            result = fn(*args)
        except (Exception, SystemExit) as error:
            _leave(error)
            if isinstance(error, SystemExit) and error.code in (None, 0, EXIT_STATUS):
                return _Outcome(is_preempted=error.code == EXIT_STATUS)
            # Without this frame, so that the traceback begins in the user's function.
            frames = error.__traceback__ and error.__traceback__.tb_next
            return _Outcome(raised="".join(traceback.format_exception(type(error), error, frames)))
        _leave(None)
        return _Outcome(result)


@dataclass(frozen=True)
class _Outcome:
    result: Any = None
    raised: str = ""  # the traceback
    is_preempted: bool = False  # it has saved its step, and can be resumed


def _leave(error: BaseException | None) -> None:
    """Leave all groups. The process belongs to Ray and lives on, so the other ranks would wait for it."""
    if "paceline.health.exit_reports" in sys.modules:  # else this rank is in no group
        from paceline.health import exit_reports

        if error is not None:
            exit_reports.announce(error)
        exit_reports.close_all()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "paceline.ray needs Ray, which is not installed here.", seen=str(error), hint="pip install ray"
        ) from None


def _start_workers(ray: Any, group: Any, bundle: Mapping[str, float], count: int) -> list[Any]:
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    kind = ray.remote(_Worker)
    return [
        kind.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=others,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=place
            ),
        ).remote()
        for place in range(count)
    ]


def _started(ray: Any, calls: Sequence[Any], deadline: float) -> list[Any]:
    _, waiting = ray.wait(list(calls), num_returns=len(calls), timeout=max(0.0, deadline - time.monotonic()))
    if waiting:
        raise ConfigError(
            f"{len(waiting)} of {len(calls)} workers of Ray did not start in time.",
            hint="`ray list actors` shows why; forming_timeout_s waits longer",
        )
    try:
        return list(ray.get(list(calls)))
    except Exception as error:
        raise LaunchError(
            "A worker of Ray did not start.",
            where="before it got its rank",
            seen=str(error),
            likely="Paceline is not installed, or not the same version, on one of the nodes",
            hint="`ray list actors` shows which node it was on",
        ) from error


def _results(ray: Any, calls: Sequence[Any], addresses: Sequence[str], name: str) -> list[Any]:
    exceptions = importlib.import_module("ray.exceptions")
    began = time.monotonic()
    outcomes: dict[int, _Outcome] = {}
    failures: dict[int, RankEnd] = {}
    waiting = list(calls)
    cause_until: float | None = None
    while waiting:
        timeout = None if cause_until is None else max(0.0, cause_until - time.monotonic())
        done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
        if not done:
            break
        rank = calls.index(done[0])
        after_s = time.monotonic() - began
        try:
            outcomes[rank] = ray.get(done[0])
        except Exception as error:
            # Raised by Ray: the process has ended, or the return value of fn cannot be pickled.
            is_dead = isinstance(error, exceptions.RayActorError)
            status = _ENDED if is_dead else _NOT_SENT
            failures[rank] = RankEnd(rank, 0, status, after_s, output=str(error))
        else:
            if outcomes[rank].raised:
                failures[rank] = RankEnd(rank, 0, _RAISED, after_s, output=outcomes[rank].raised)
        if any(not is_consequence(end) for end in failures.values()):
            break
        if failures and cause_until is None:
            cause_until = time.monotonic() + _CAUSE_WITHIN_S
    first = first_failure(list(failures.values()))
    if first is None and any(outcome.is_preempted for outcome in outcomes.values()):
        raise SystemExit(EXIT_STATUS)
    if first is None:
        return [outcomes[rank].result for rank in range(len(calls))]
    how = {_ENDED: "its process has ended", _NOT_SENT: "what it returned could not be sent"}
    is_raised = first.status == _RAISED
    raise LaunchError(
        f"Rank {first.rank} of {len(calls)} failed first: "
        f"{exception_line(first.output) if is_raised else how[first.status]}",
        where=f"{name}, node {addresses[first.rank]}",
        seen="\n".join(others(list(failures.values()), first)),
        got=evidence(first),
        hint="the output of the workers is above, and in the logs of Ray",
        rank=first.rank,
        traceback=first.output if is_raised else "",
        failures=tuple(sorted(failures.values(), key=lambda end: (end is not first, end.after_s))),
    )


def _checked_resources(resources: Mapping[str, float]) -> dict[str, float]:
    hint = 'resources={"CPU": 4, "GPU": 1}'
    if not isinstance(resources, Mapping) or not resources:
        raise _arguments.refuse("resources", resources, "amounts by Ray's names", hint, is_type=True)
    for name, amount in resources.items():
        is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not isinstance(name, str) or not is_number or not amount >= 0:
            raise _arguments.refuse("resources", resources, "amounts, 0 or more, by Ray's names", hint)
    if not any(resources.values()):
        raise _arguments.refuse("resources", resources, "more than nothing", hint)
    return {name: float(amount) for name, amount in resources.items() if amount}


def _spell(resources: Mapping[str, float]) -> str:
    shown = {name: amount for name, amount in resources.items() if ":" not in name and "memory" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"
