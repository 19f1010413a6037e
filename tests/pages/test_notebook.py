"""`paceline.spawn` in the cells of a real notebook kernel."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import seconds_until_gone

pytest.importorskip("ipykernel", reason="there is no ipykernel to run cells with")
pytest.importorskip("jupyter_client", reason="there is no jupyter_client to run cells with")

from tests.notebook import Kernel, Shown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "notebook.md"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for all these tests, so each cell runs after the failures and interrupts of earlier ones."""
    kernel = Kernel(tmp_path_factory.mktemp("k"))
    kernel.run("import os, time\nimport paceline")
    yield kernel
    kernel.close()


def children(pid: int) -> set[int]:
    """The child processes of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def test_the_output_of_ranks_is_shown_while_they_run(kernel: Kernel, tmp_path: Path) -> None:
    """Each rank continues only when the cell shows the earlier output of both ranks."""
    cell = f"""
folder = {str(tmp_path)!r}

def say(rank):
    for word in ("first", "second"):
        print(word, flush=True)
        while not os.path.exists(os.path.join(folder, word)):
            time.sleep(0.01)

paceline.spawn(say, nprocs=2)
"""

    def let_go(shown: Shown) -> None:
        for word in ("first", "second"):
            if all(f"[rank {rank}] {word}\n" in shown.stdout for rank in (0, 1)):
                (tmp_path / word).touch()

    shown = kernel.run(cell, let_go)
    assert shown.error == ""
    expected = [f"[rank {rank}] {word}" for rank in (0, 1) for word in ("first", "second")]
    assert sorted(shown.stdout.splitlines()) == expected
    assert shown.stderr == ""


def test_a_ranks_error_is_shown_once_with_the_line_of_its_cell(kernel: Kernel) -> None:
    shown = kernel.run("""
def fail(rank):
    if rank == 1:
        raise ValueError("only here")
    time.sleep(1000)

paceline.spawn(fail, nprocs=2, grace_s=0.5)
""")
    assert shown.error.startswith("LaunchError: Rank 1 of 2 failed first")
    assert re.search(
        r"Traceback .*\n\s+Cell In\[\d+\], line 3, in fail\n\s+raise ValueError\(\"only here\"\)\n"
        r"\s+ValueError: only here",
        shown.error,
    )
    assert "ValueError" not in shown.stdout + shown.stderr
    # The cell shows the stack of the hanging rank. Its own traceback has one frame of Paceline.
    assert re.search(r"where rank 0 is:\n(.*\n)?\s+Cell In\[\d+\], line 4 in fail", shown.stderr)
    assert "ipykernel_" not in shown.error + shown.stderr
    assert len(re.findall(r"^File .*paceline", shown.traceback, re.M)) == 1


def test_the_stop_button_ends_the_ranks(kernel: Kernel) -> None:
    before = children(kernel.pid)
    pids: list[int] = []

    def stop(shown: Shown) -> None:
        found = [int(pid) for pid in re.findall(r"pid (\d+)\n", shown.stdout)]
        if len(found) == 2 and not pids:
            pids.extend(found)
            kernel.interrupt()

    shown = kernel.run(
        """
def stay(rank):
    print("pid", os.getpid(), flush=True); time.sleep(1000)

paceline.spawn(stay, nprocs=2, grace_s=5)
""",
        stop,
    )
    assert shown.error == "KeyboardInterrupt: "
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # they ended before the cell did
    assert children(kernel.pid) <= before
    for rank in (0, 1):
        where = (
            rf"\[rank {rank}\]   Cell In\[\d+\], line 2, in stay\n\[rank {rank}\]     .*time.sleep\(1000\)\n"
        )
        assert re.search(where, shown.stderr), shown.stderr
    assert "spawned.py" not in shown.stderr


def test_the_cells_of_the_page_run_in_a_kernel_whose_torch_has_threads(kernel: Kernel) -> None:
    """The cells run twice, in the same kernel as the cells that failed and were stopped."""
    text = PAGE.read_text()
    cells = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    output = re.search(r"```\n(\[rank .*?)```$", text, re.M | re.S)
    assert output
    kernel.run("import torch; torch.set_num_threads(2); x = torch.randn(300, 300); x @ x")
    for cell in cells:
        shown = kernel.run(cell)
        assert shown.error == "", shown.traceback
        if "spawn(train" in cell:
            said = sorted(shown.stdout.splitlines())
            assert [re.sub(r"loss .*", "", line) for line in said] == [
                re.sub(r"loss .*", "", line) for line in sorted(output[1].splitlines())
            ]
            again = kernel.run(cell)
            assert sorted(again.stdout.splitlines()) == said  # the same bits, each time


def test_the_ranks_die_with_the_kernel(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    try:
        shown = kernel.run("""
import os, time
import paceline

def stay(rank):
    time.sleep(1000)

context = paceline.spawn(stay, nprocs=2, join=False)
print(*context.pids())
""")
        pids = [int(pid) for pid in shown.stdout.split()]
        assert len(pids) == 2
        os.kill(kernel.pid, 9)
        assert seconds_until_gone(pids) < 240
    finally:
        kernel.close()
