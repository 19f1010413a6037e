"""`paceline.ray.run` on a cluster of two nodes of two CPUs, which Ray starts on this machine.

python -m tests.integrations.ray_program FOLDER

Writes FOLDER/found.json: the results and errors of the runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

import paceline
import paceline.ray
from paceline.errors import ConfigError, LaunchError

WITHIN_S = 120


def where_it_runs(factor: float) -> dict[str, Any]:
    from paceline.rendezvous.secret import find_secret

    with paceline.init(timeout_s=60) as group:
        array = np.full(3, factor * (group.rank + 1.0))
        group.all_reduce(array)
        key = find_secret().key
    return {
        "rank": int(os.environ["RANK"]),
        "node": ray.get_runtime_context().get_node_id(),
        "local": [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]],
        "sum": array[0],
        "has secret": len(key) == 64,
        "secret in environment": key.decode() in repr(dict(os.environ)),
        "pid": os.getpid(),
    }


def raising() -> None:
    with paceline.init(timeout_s=60) as group:
        group.barrier()
        if group.rank == 2:
            raise ValueError("no such file: data.bin")
        group.barrier()


def dying(folder: str) -> None:
    with paceline.init(timeout_s=60) as group:
        Path(folder, f"{group.rank}.pid").write_text(str(os.getpid()))
        group.barrier()
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier()


def returning_a_lock() -> Any:
    return threading.Lock() if os.environ["RANK"] == "1" else None


def training(folder: str, stops_at: int) -> list[str]:
    """Train six steps with a Checkpointer; in step `stops_at`, rank 3 signals itself before the backward.

    The timeout is long because Ray's workers have a low priority, and so has the process that writes.

    Returns:
        The step at which training began, and the weights.
    """
    import torch

    import paceline.torch

    paceline.torch.init_process_group(timeout=timedelta(seconds=600))
    torch.manual_seed(5)
    ddp = paceline.torch.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(ddp.parameters())
    ddp.register_state("optimizer", optimizer)
    with paceline.Checkpointer(folder, ddp) as checkpointer:
        begins = steps = checkpointer.resume()
        while steps < 6:
            if steps == stops_at and os.environ["RANK"] == "3":
                os.kill(os.getpid(), signal.SIGUSR1)
            data = torch.Generator().manual_seed(10 * steps + int(os.environ["RANK"]))
            ddp(torch.randn(3, 4, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            checkpointer.step()
    return [str(begins), *(str(each.tolist()) for each in ddp.parameters())]


def preempted(folder: Path) -> dict[str, Any]:
    """Run a training that is stopped and called again, and one that is not stopped."""
    found: dict[str, Any] = {"undisturbed": paceline.ray.run(training, (f"{folder}/a", 6), num_workers=4)}
    try:
        paceline.ray.run(training, (f"{folder}/b", 3), num_workers=4)
    except SystemExit as error:
        found["status"] = error.code
    found["resumed"] = paceline.ray.run(training, (f"{folder}/b", 6), num_workers=4)
    return found


def failure(*args: Any, **options: Any) -> dict[str, Any]:
    """The error of a run, and whether all its resources are free again within WITHIN_S."""
    try:
        paceline.ray.run(*args, **options)
    except (ConfigError, LaunchError) as error:
        found = {
            "kind": type(error).__name__,
            "text": str(error),
            "rank": getattr(error, "rank", None),
            "traceback": getattr(error, "traceback", None),
        }
    else:
        raise AssertionError("it raises nothing")
    return found | {"free again": comes_true(lambda: ray.available_resources().get("CPU", 0) == 4)}


def comes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def main() -> None:
    folder = Path(sys.argv[1])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        found: dict[str, Any] = {"places": paceline.ray.run(where_it_runs, (2,), num_workers=4)}
        found["preempted"] = preempted(folder)
        found["raised"] = failure(raising, num_workers=4)
        found["died"] = failure(dying, (str(folder),), num_workers=4)
        found["not sent"] = failure(returning_a_lock, num_workers=2)
        for name, count, resources in [
            ("too many", 5, {"CPU": 1}),
            ("too large", 1, {"CPU": 3}),
            ("no such thing", 2, {"CPU": 1, "FPGA": 1}),
        ]:
            found[name] = failure(raising, num_workers=count, resources=resources, forming_timeout_s=1)
        pids = [rank["pid"] for rank in found["places"]]
        pids += [int(each.read_text()) for each in folder.glob("*.pid")]
        found["processes"] = len(pids)
        found["are gone"] = comes_true(lambda: all(is_gone(pid) for pid in pids))
        (folder / "found.json").write_text(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
