"""Trains on one epoch in a job that is killed and restarted again and again, for test_sampler_resume.

A rank "trains" by appending its indices to a file. As in a real job, a step ends only when all ranks have
done it, and rank 0 then writes a checkpoint by renaming a complete file. Steps after the last checkpoint are
lost with the weights, so they do not count. The ranks are forks of this process, which has numpy loaded.

For more kills or other seeds: python -m tests.multiprocess.sampler_lives FOLDER KIND KILLS SEED
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from paceline.data import DistributedBatchSampler, DistributedSampler

LENGTH = 8_009
BATCH = 4
POINTS = ("after drawing", "after logging", "before the checkpoint", "after the checkpoint")


class Life:
    """One launch of the job: from the start or the last checkpoint until it is killed or the epoch ends.

    Args:
        folder: Holds the checkpoint and the logs.
        number: Number of this launch.
        world_size: Number of ranks.
        killed: The rank that is killed, the step and the point; None: no rank is killed.
        kind: The sampler; see `make`.
    """

    def __init__(
        self, folder: Path, number: int, world_size: int, killed: tuple[int, int, str] | None, kind: str
    ) -> None:
        self.folder = folder
        self.number = number
        self.world_size = world_size
        self.killed = killed
        self.kind = kind
        self.done = mmap.mmap(-1, 8 * world_size)  # steps that each rank has done; shared with the children

    def run(self) -> bool:
        """Start all ranks; when one dies, kill the others, as a launcher does. Returns whether one died."""
        pids = [self._fork(rank) for rank in range(self.world_size)]
        left = set(pids)
        was_killed = False
        while left:
            pid, status = os.wait()
            left.discard(pid)
            if status != 0:
                assert os.WIFSIGNALED(status) and self.killed, f"a rank failed: {status}"
                was_killed = True
                for other in left:
                    os.kill(other, signal.SIGKILL)
        return was_killed

    def _fork(self, rank: int) -> int:
        pid = os.fork()
        if pid == 0:
            self._rank(rank)
        return pid

    def _rank(self, rank: int) -> NoReturn:
        try:
            self._train(rank)
            os._exit(0)
        except BaseException as error:
            print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)

    def _train(self, rank: int) -> None:
        sampler = make(self.kind, self.world_size, rank)
        checkpoint = self.folder / "checkpoint.json"
        if checkpoint.exists():
            sampler.load_state_dict(json.loads(checkpoint.read_text())["sampler"])
        sampler.set_epoch(0)
        log = os.open(self.folder / f"log-{self.number}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        ahead: list[list[int]] = []
        batches = iter(batched(sampler))
        for step in range(1, 10**9):
            while len(ahead) < 3 and (batch := next(batches, None)) is not None:
                ahead.append(batch)
            if not ahead:
                break
            batch = ahead.pop(0)
            self._die_at(rank, step, "after drawing")
            os.write(log, struct.pack(f"<{2 + len(batch)}q", step, len(batch), *batch))
            self._die_at(rank, step, "after logging")
            self._barrier(rank, step)
            sampler.commit(len(batch) if isinstance(sampler, DistributedSampler) else 1)
            self._die_at(rank, step, "before the checkpoint")
            if rank == 0:
                text = json.dumps({"life": self.number, "step": step, "sampler": sampler.state_dict()})
                (self.folder / "new.json").write_text(text)
                os.rename(self.folder / "new.json", checkpoint)
                self._die_at(rank, step, "after the checkpoint")
        self._barrier(rank, 1 << 60)  # a rank without more data waits for no rank, and no rank waits for it

    def _barrier(self, rank: int, step: int) -> None:
        struct.pack_into("<q", self.done, 8 * rank, step)
        deadline = time.monotonic() + 60
        while min(struct.unpack(f"<{self.world_size}q", self.done[:])) < step < 1 << 60:
            assert time.monotonic() < deadline, f"step {step}: a rank did not reach it"
            os.sched_yield()

    def _die_at(self, rank: int, step: int, point: str) -> None:
        if self.killed == (rank, step, point):
            os.kill(os.getpid(), signal.SIGKILL)


def make(kind: str, world_size: int, rank: int) -> DistributedSampler | DistributedBatchSampler:
    """One of the two samplers, without padding: ranks may get unequally many samples."""
    if kind == "samples":
        return DistributedSampler(range(LENGTH), world_size, rank, seed=1, pad=False)
    return DistributedBatchSampler(
        range(LENGTH), None, world_size, rank, shuffle=True, seed=1, pad=False, global_batch_size=3 * BATCH
    )


def batched(sampler: DistributedSampler | DistributedBatchSampler) -> Iterator[list[int]]:
    """Batches of indices, as a loader makes them."""
    if isinstance(sampler, DistributedBatchSampler):
        yield from sampler
        return
    batch: list[int] = []
    for index in sampler:
        batch.append(index)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def trained(folder: Path, steps: dict[int, int]) -> list[int]:
    """The indices that all ranks have logged in each launch, up to the step of its last checkpoint."""
    indices: list[int] = []
    for path in folder.glob("log-*"):
        life = int(path.name.split("-")[1])
        numbers = struct.unpack(f"<{path.stat().st_size // 8}q", path.read_bytes())
        at = 0
        while at < len(numbers):
            step, count = numbers[at : at + 2]
            if step <= steps.get(life, 0):
                indices += numbers[at + 2 : at + 2 + count]
            at += 2 + count
    return indices


def main(folder: Path, kind: str, kills: int, seed: int) -> None:
    """Kill a job `kills` times at random, let it finish, and count how often samples were committed."""
    chance = random.Random(seed)
    steps: dict[int, int] = {}
    world_size = deaths = 0
    for number in range(kills + 1):
        world_size = chance.choice([size for size in (1, 2, 3, 5) if size != world_size])
        killed = (chance.randrange(world_size), chance.randint(1, 40), chance.choice(POINTS))
        if killed[2] == POINTS[3]:
            killed = (0, *killed[1:])
        deaths += Life(folder, number, world_size, killed if number < kills else None, kind).run()
        checkpoint = folder / "checkpoint.json"
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            steps[saved["life"]] = saved["step"]
    counts = [0] * LENGTH
    for index in trained(folder, steps):
        counts[index] += 1
    print(json.dumps({"once": counts.count(1), "never": counts.count(0), "deaths": deaths}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
