"""A program: three ranks train over Paddle's process group, one of them raises, and each exits normally.

Prints the exit status and the output of each rank, as JSON. The ranks are forks of this process, which has
imported Paddle. Unlike ranks of the harness, they run to the end of the interpreter.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import time

import paddle
import paddle.distributed as dist

from paceline.paddle import DataParallel

WORLD_SIZE, GUILTY = 3, 1


def main() -> None:
    """Fork the ranks. In a rank the error leaves this function, and the interpreter ends as in a script."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outputs = [os.memfd_create(f"output of rank {rank}") for rank in range(WORLD_SIZE)]
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            for number in (1, 2):
                os.dup2(outputs[rank], number)
            train(rank, port)
        pids.append(pid)
    ended = []
    for pid, output in zip(pids, outputs, strict=True):
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ended.append((status, os.pread(output, 1 << 20, 0).decode(errors="replace")))
    print(json.dumps(ended))


def train(rank: int, port: int) -> None:
    """Run two backwards; one rank raises before the second."""
    atexit.register(os.write, 1, b"the first to be registered\n")
    os.environ |= {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(WORLD_SIZE),
        "PADDLE_MASTER": f"127.0.0.1:{port}",
        "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{port + rank}",
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    paddle.set_device("cpu")
    while rank and socket.socket().connect_ex(("127.0.0.1", port)):  # Paddle's store would wait 30 s more
        time.sleep(0.01)
    dist.init_parallel_env()
    model = DataParallel(paddle.nn.Linear(200, 200), reduce_through="group", timeout_s=60)
    atexit.register(os.write, 1, b"the last to be registered\n")
    for count in range(2):
        if count and rank == GUILTY:
            raise ValueError("the cause")
        model(paddle.ones([4, 200])).sum().backward()
    raise AssertionError("the backward succeeded without its peer")


if __name__ == "__main__":
    main()
