"""Paceline on Ray: `paceline.ray.run` calls a function on workers of a Ray cluster, which form one job.

    paceline.ray.run(train, num_workers=8, resources={"CPU": 4})

Ray places the workers where there is room, in no order; here they get their ranks by node, in blocks, and the
variables that torchrun would have set. The job's secret goes to them as an argument of Ray's calls, and
stands in no environment. Imports errors, arguments, launch and rendezvous, and ray when it is asked for.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from paceline.arguments import Arguments
from paceline.errors import ConfigError, LaunchError
from paceline.rendezvous.secret import NO_SECRET, JobSecret, adopt_secret, new_secret, users_secret

__all__ = ["run"]

_arguments = Arguments("paceline.ray.run")


def run(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    *,
    num_workers: int,
    resources: Mapping[str, float] | None = None,
    forming_timeout_s: float | timedelta = 300.0,
) -> list[Any]:
    """Call `fn(*args)` on `num_workers` workers of the Ray cluster, each one rank of a job.

    Ranks are given out by node, in blocks, so that few bytes cross the network. Each worker has RANK,
    WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so
    `paceline.torch.init_process_group()` works in it. Blocks until all have returned. When one fails, the
    others are ended. Connects to a cluster with ray.init(), unless that has been called.

    The ranks recognise each other by a secret of this job: that of this process, if the user has named one
    (PACELINE_SECRET_FILE), else a new one. It travels as Ray's own calls do, which are encrypted only if the
    cluster is set up with RAY_USE_TLS.

    Args:
        fn: What to call; Ray pickles it.
        args: Its arguments, the same for each rank.
        num_workers: Number of ranks.
        resources: What each worker takes up, in Ray's names: {"CPU": 4, "GPU": 1}; None: one CPU.
        forming_timeout_s: Seconds for the cluster to have room for all workers, and to start them.

    Returns:
        What `fn` returned, by rank.

    Raises:
        ConfigError: Ray is not installed, an argument is wrong, the cluster has not had room in time, or the
            file of the user's secret cannot be read.
        LaunchError: A rank raised or died. It names the rank and its node, and quotes the traceback.

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
            raise ConfigError(
                f"The Ray cluster has no room for {count} workers of {_spell(bundle)} each.",
                seen=f"free: {_spell(ray.available_resources())}; in all: {_spell(ray.cluster_resources())}",
                likely="other jobs hold it, or no node is large enough for one worker",
                hint="fewer workers, or less for each; `ray status` shows who holds what; "
                "forming_timeout_s waits longer",
            )
        workers = _start_workers(ray, group, bundle, count)
        places = _collect(ray, [worker.place.remote() for worker in workers], range(count), deadline)
        order = in_blocks([node for node, _ in places])
        ranked = [workers[each] for each in order]
        port = _collect(ray, [ranked[0].free_port.remote()], [0], deadline)[0]
        variables = rank_variables([places[each] for each in order], port, os.urandom(16).hex())
        calls = [
            worker.call.remote(own, secret, fn, tuple(args))
            for worker, own in zip(ranked, variables, strict=True)
        ]
        return _collect(
            ray, calls, range(count), None, [address for _, address in map(places.__getitem__, order)]
        )
    finally:
        for worker in workers:
            ray.kill(worker)
        ray.util.remove_placement_group(group)


def in_blocks(nodes: Sequence[str]) -> list[int]:
    """The order that puts the workers of a node beside each other; nodes as they first come.

    Example:
        >>> in_blocks(["b", "a", "b", "a"])
        [0, 2, 1, 3]
    """
    first = {node: place for place, node in reversed([*enumerate(nodes)])}
    return sorted(range(len(nodes)), key=lambda place: (first[nodes[place]], place))


def rank_variables(places: Sequence[tuple[str, str]], port: int, job_id: str) -> list[dict[str, str]]:
    """The variables of each rank.

    Args:
        places: The node and its address, of each rank.
        port: The port of rank 0.
        job_id: What no other job has.

    Example:
        Of two ranks on nodes "a" and "b", the second gets RANK=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, ...
    """
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


def secret_for_workers(environ: Mapping[str, str]) -> JobSecret:
    """The user's, or a new one for this job.

    Raises:
        ConfigError: The user's cannot be read.
    """
    users = users_secret(environ)
    return new_secret("paceline.ray.run") if users is NO_SECRET else users


class _Worker:
    """One rank, in a process of Ray's."""

    def place(self) -> tuple[str, str]:
        """The id of its node, and the address of that."""
        ray = _ray()
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def free_port(self) -> int:
        """A port of its node that nobody has."""
        from paceline.launch.ports import free_ports

        return free_ports(1)[0]

    def call(
        self, variables: Mapping[str, str], secret: JobSecret, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        """Be a rank, and return what `fn` returns."""
        adopt_secret(secret)
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        os.environ.update(variables)
        return fn(*args)


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


def _collect(
    ray: Any,
    calls: Sequence[Any],
    ranks: Iterable[int],
    deadline: float | None,
    addresses: Sequence[str] = (),
) -> list[Any]:
    """The results of calls, in their order; raises for the first that fails."""
    rank_of = dict(zip(calls, ranks, strict=True))
    waiting = list(calls)
    while waiting:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
        if not done:
            raise ConfigError(
                f"{len(waiting)} of {len(calls)} workers of Ray did not start in time.",
                hint="`ray list actors` shows why; forming_timeout_s waits longer",
            )
        try:
            ray.get(done[0])
        except Exception as error:
            rank = rank_of[done[0]]
            where = f"node {addresses[rank]}" if addresses else "before it got its rank"
            summary = (
                f"Rank {rank} of {len(calls)} failed." if addresses else "A worker of Ray did not start."
            )
            raise LaunchError(
                summary,
                where=where,
                seen=str(error),
                hint="its traceback is above; the output of the others may tell more",
                rank=rank,
            ) from error
    return list(ray.get(list(calls)))


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
