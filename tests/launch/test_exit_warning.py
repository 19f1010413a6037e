"""If a rank skips an iteration and exits while the others wait for it, it warns, and the others raise."""

from __future__ import annotations

import os

import pytest

from tests.harness.warm import warm_python
from tests.launch.conftest import Launcher

TRAIN = """
    import logging
    import torch
    from paceline.torch import DistributedDataParallel

    def notice(record):
        # Rank 0 logs this after it has waited for a while; rank 1 has run three backwards.
        if "in backward of iteration 4" in record.getMessage():
            open("waits", "w").close()
        return True

    logging.getLogger("paceline").addFilter(notice)

    def main():
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1), warn_after_s=0.05)
        for number in range(4):
            if rank == 1 and number == 2 and {skips}:
                continue
            ddp(torch.ones(1, 2)).sum().backward()
        if rank == 1:
            while {skips} and not os.path.exists("waits"):
                time.sleep(0.001)

    main()
"""


@pytest.mark.parametrize("skips", [True, False])
def test_a_rank_that_leaves_too_early_warns(launcher: Launcher, skips: bool) -> None:
    launcher.python = warm_python("torch")
    done = launcher.run("-n", "2", "script.py", script=TRAIN.format(skips=skips))
    assert ("Rank 1 of 2 leaves while rank 0 waits for it" in done.stderr) == skips
    assert "Rank 0 of 2 leaves" not in done.stderr
    assert (done.returncode != 0) == skips
    assert ("Rank 1 of 2 left the group while rank 0 waited" in done.stderr) == skips
    # The warning cannot know which of its likely causes is true, and both messages name the same way out.
    assert ("if it skipped an iteration, the steps of the ranks belong to different" in done.stderr) == skips
    assert done.stderr.count("ddp.iterate(loader)") == 2 * skips


LOSE = """
    import torch
    from paceline.errors import PeerLostError
    from paceline.torch import DistributedDataParallel
    from tests.several_hosts import be_on_host

    be_on_host(rank // 2)
    torch.distributed.init_process_group("gloo")
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
    assert ddp.gradient_path == "hosts"
    for number in range(3):
        if rank == 2 and number == 2:
            sys.exit()
        try:
            ddp(torch.ones(1, 2)).sum().backward()
        except PeerLostError as error:
            print(f"rank {rank} has caught it", flush=True)
            sys.exit(3)
"""


def test_ranks_that_leave_because_another_one_is_lost_blame_none(launcher: Launcher) -> None:
    """They exit in the middle of the same backward, so to each of them the other one seems to wait for it."""
    launcher.python = warm_python("torch")
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = launcher.run("-n", "3", "script.py", script=LOSE, env=environment)
    assert "leaves while" not in done.stderr
    assert done.stdout.count("has caught it") == 2, done.stdout + done.stderr
