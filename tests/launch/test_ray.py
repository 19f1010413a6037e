"""`paceline.ray.run` on a real cluster of two nodes, which Ray starts on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")

PROGRAM = """
    import json
    import os
    import time

    import ray
    from ray.cluster_utils import Cluster

    import paceline.ray
    from paceline.errors import ConfigError, LaunchError


    def rank_program(factor):
        import numpy as np
        import paceline

        with paceline.init(timeout_s=60) as group:
            array = np.full(3, factor * (group.rank + 1.0))
            group.all_reduce(array)
        node = ray.get_runtime_context().get_node_id()
        return group.rank, node, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], array[0]


    def failing():
        if os.environ["RANK"] == "2":
            raise ValueError("no such file: data.bin")
        time.sleep(600)


    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        found = {"places": paceline.ray.run(rank_program, (2,), num_workers=4)}
        began = time.monotonic()
        try:
            paceline.ray.run(failing, num_workers=4)
        except LaunchError as error:
            found["failed"] = [error.rank, str(error), time.monotonic() - began]
        try:
            paceline.ray.run(failing, num_workers=5, forming_timeout_s=1)
        except ConfigError as error:
            found["no room"] = str(error)
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()
"""


def test_workers_of_two_nodes_are_ranks_in_blocks(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": "/tmp"}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    ranks, nodes, local_ranks, sizes, sums = zip(*found["places"], strict=True)
    assert ranks == (0, 1, 2, 3)
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert local_ranks == ("0", "1", "0", "1")
    assert set(sizes) == {"2"}
    assert set(sums) == {2 * (1 + 2 + 3 + 4)}
    rank, text, seconds = found["failed"]
    assert rank == 2
    assert "Rank 2 of 4 failed." in text
    assert "no such file: data.bin" in text
    assert seconds < 120  # the others would have slept 600
    assert "no room for 5 workers of 1 CPU each" in found["no room"]
    assert "in all: 4 CPU" in found["no room"]
