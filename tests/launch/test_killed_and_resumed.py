"""Real jobs that SIGKILL ends at random steps go on from a checkpoint with another number of ranks.

Their model counts samples: the gradient of a batch is 1 for each sample in it. So a model that was trained on
every sample exactly once is all ones at the end. Fifty kills: PACELINE_TEST_KILLS=50 pytest THIS_FILE
"""

from __future__ import annotations

import os
import random

import numpy as np

from tests.launch.conftest import Launcher

KILLS = int(os.environ.get("PACELINE_TEST_KILLS", "3"))
LENGTH = 103 + 60 * KILLS  # more samples than the killed jobs can train on
MOST_STEPS = 12
SCRIPT = """
import json
from itertools import islice

import numpy as np
import paceline
from paceline.data import DistributedSampler

length, killed_rank, killed_step, point = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = np.zeros(length + 1)  # one more than samples: how many ranks still have data
sampler = DistributedSampler(range(length), pad=False)
if os.path.exists("checkpoint.npz"):
    with np.load("checkpoint.npz") as saved:
        model = saved["model"]
        sampler.load_state_dict(json.loads(str(saved["sampler"])))
sampler.set_epoch(0)


def die_at(here):
    if (rank, step, here) == (killed_rank, killed_step, point):
        os.kill(os.getpid(), signal.SIGKILL)


with paceline.init() as group:
    samples = iter(sampler)
    ahead = list(islice(samples, 6))  # what a loader's workers have fetched: not trained on yet
    step = 0
    while True:
        step += 1
        batch, ahead = ahead[:2], ahead[2:]
        ahead += islice(samples, 2)
        gradient = np.zeros(length + 1)
        gradient[batch] = 1
        gradient[length] = len(batch) > 0
        die_at("before the step")
        group.all_reduce(gradient)
        if gradient[length] == 0:
            break
        model += gradient
        sampler.commit(len(batch))
        die_at("after the step")
        if rank == 0:
            np.savez("new.npz", model=model, sampler=json.dumps(sampler.state_dict()))
            os.rename("new.npz", "checkpoint.npz")
        die_at("after the checkpoint")
"""


def test_every_sample_is_committed_exactly_once(launcher: Launcher) -> None:
    chance = random.Random(11)
    launcher.write(SCRIPT)
    ranks = 0
    for _ in range(KILLS):
        ranks = chance.choice([count for count in (1, 2, 3, 4) if count != ranks])
        point = chance.choice(("before the step", "after the step", "after the checkpoint"))
        victim = (chance.randrange(ranks), chance.randint(1, MOST_STEPS), point)
        ended = run(launcher, ranks, *victim)
        assert ended.returncode == 128 + 9 and "SIGKILL" in ended.stderr, ended.stderr
    ended = run(launcher, 2 if ranks != 2 else 3, -1, 0, "never")
    assert ended.returncode == 0, ended.stderr
    with np.load(launcher.folder / "checkpoint.npz") as saved:
        assert saved["model"][:LENGTH].tolist() == [1] * LENGTH


def run(launcher: Launcher, ranks: int, victim: int, step: int, point: str):
    return launcher.run("-n", str(ranks), "script.py", str(LENGTH), str(victim), str(step), point)
