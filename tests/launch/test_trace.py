"""`paceline run --trace` and `paceline trace`: after a rank is killed, the recordings of all ranks remain."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.harness.warm import warm_python
from tests.launch.conftest import WITHIN_S, Launcher
from tests.traces import backwards_of, read_trace, slices_of

ROOT = Path(__file__).parents[2]
TRAINS = """
    import torch
    from pathlib import Path
    from tests.traces import until_ended
    from paceline.torch import DistributedDataParallel
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for number in range(1, 9):
        loss = ddp(torch.ones(2, 8)).sum()
        if number == 5 and rank == 1:
            until_ended(Path(os.environ["PACELINE_TRACE_DIR"]), 0, 5)
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
"""


def paceline(
    *arguments: str, folder: Path, python: str = sys.executable, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "paceline", *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )


def test_a_killed_rank_leaves_its_last_backwards(launcher: Launcher) -> None:
    folder = launcher.folder
    launcher.write(TRAINS)
    command = ("run", "-n", "2", "--trace", "out.json", "script.py")
    done = paceline(*command, folder=folder, python=warm_python("torch"))
    assert done.returncode == 137, done.stderr
    assert "paceline: the trace is in out.json (open it at https://ui.perfetto.dev)" in done.stderr
    assert "rank 1 of 2 failed first" in done.stderr.splitlines()[-1]
    threads = read_trace(folder / "out.json")
    assert backwards_of(threads["rank 0"], "backward") == [1, 2, 3, 4, 5]
    # Rank 1 was killed after its fifth forward, while rank 0 waited for it.
    assert backwards_of(threads["rank 1"], "forward") == [1, 2, 3, 4, 5]
    assert backwards_of(threads["rank 1"], "backward") == [1, 2, 3, 4]
    assert len(slices_of(threads["rank 1"], "optimizer")) == 4
    assert slices_of(threads["rank 0"], "average")[-1]["args"] == {"iteration": 5, "raised": True}

    listed = paceline("trace", folder=folder)
    assert listed.stdout.endswith("2 ranks  script.py: exit status 137\n")
    shown = paceline(
        "trace", listed.stdout.split()[0], "--passes", "2", "--output", "later.json", folder=folder
    )
    assert shown.returncode == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert [row[:2] for row in rows[3:7]] == [["4", "0"], ["4", "1"], ["5", "0"], ["5", "1"]]
    assert "rank 1 (pid " in shown.stdout
    assert "PeerLostError: Rank 1 of 2 died" in shown.stdout
    assert read_trace(folder / "later.json").keys() == threads.keys()


def test_an_output_that_cannot_be_written_is_reported_before_ranks_start(launcher: Launcher) -> None:
    launcher.write("print('started')")
    done = paceline("run", "-n", "2", "--trace", "none/out.json", "script.py", folder=launcher.folder)
    assert done.returncode == 2
    assert "The trace can't be written to none/out.json." in done.stderr
    assert "started" not in done.stdout


def test_a_script_that_wraps_no_model_is_reported(launcher: Launcher) -> None:
    launcher.write("print('done')")
    done = paceline("run", "-n", "2", "--trace", "out.json", "script.py", folder=launcher.folder)
    assert done.returncode == 0
    assert "No rank of this job has recorded a backward." in done.stderr
    assert not (launcher.folder / f"paceline-{os.getuid()}").exists() or not list(
        (launcher.folder / f"paceline-{os.getuid()}").iterdir()
    )


SLOW_LOADER = """
    import time
    import torch
    from pathlib import Path
    from tests.traces import until_ended
    from paceline.torch import DistributedDataParallel
    import torch.distributed as dist

    STEPS = 22


    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return STEPS

        def __getitem__(self, index):
            if rank == 1 and index:
                until_ended(Path(os.environ["PACELINE_TRACE_DIR"]), 0, index + 1)
                time.sleep(0.06)
            return torch.ones(8)


    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for row in torch.utils.data.DataLoader(Rows()):
        optimizer.zero_grad()
        ddp(row).sum().backward()
        optimizer.step()
"""


def test_a_rank_that_sleeps_in_its_data_loader_is_named_at_the_end(launcher: Launcher) -> None:
    """Rank 1 loads each row 60 ms after rank 0 has ended the backward of that row, or later."""
    folder = launcher.folder
    launcher.write(SLOW_LOADER)
    command = ("run", "-n", "2", "--trace", "out.json", "script.py")
    few = {"PACELINE_TRACE_RECORDS": "2048"}  # rank 1 reads the recording again and again
    done = paceline(*command, folder=folder, python=warm_python("torch"), **few)
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "the others waited for" in line]
    assert said.startswith("paceline: the others waited for rank 1 of 2 (host ")
    # A rank that gets no core may be late although the other one slept.
    percent = re.search(r"in (\d+) % of (20|21) steps, ", said)
    assert percent is not None and int(percent[1]) >= 50
    assert " Why: its data loading took " in said
    assert read_trace(folder / "out.json").keys() == {"rank 0", "rank 1"}
