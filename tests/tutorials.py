"""Runs the tutorials as a reader does: writes their scripts, runs their commands, compares their output.

A page is a list of steps. A block of Python that begins with "# name.py" is that file. A block of sh is a
command, and the plain blocks after it are its output. So the output in a page is real: `python -m
tests.tutorials first` runs docs/tutorials/first.md, and writes the real output into the page.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorials"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_NUMBER = re.compile(r"-?\b\d[\d.]*(e[+-]?\d+)?\b")
_ON_OTHER_HOSTS = re.compile(r"^paceline: [Hh]ost \S+ (has waited|waits for) .*\n?", re.M)
_ON_A_SLOW_RANK = re.compile(r"^paceline: the others waited for rank .*\n", re.M)
# A warning of torch's agent, with its stack, if the agent that holds the store happens to end first.
_OF_TORCHS_AGENT = re.compile(
    r"^(\[?W\d{4} .*|Exception raised from .*|frame #.*|<omitting python frames>)\n?", re.M
)
_WITHIN_S = 300.0


@dataclass
class Step:
    """A command of a page.

    Attributes:
        command: Its words.
        files: The files to write before it, by name.
        shown: Its output according to the page: one text for each host.
        spans: The positions of these texts in the page.
    """

    command: list[str]
    files: dict[str, str]
    shown: list[str] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)


def steps(page: Path) -> list[Step]:
    """The commands of a page, in their order."""
    found: list[Step] = []
    files: dict[str, str] = {}
    for block in _BLOCK.finditer(page.read_text()):
        kind, text = block[1], block[2]
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name, f"{page.name}: a script begins with its name: {text[:40]!r}"
            files[name[1]] = text
        elif kind == "sh":
            found.append(Step(text.split(), files))
            files = {}
        elif kind == "":
            found[-1].shown.append(text)
            found[-1].spans.append(block.span(2))
    assert not files, f"{page.name}: nothing runs {', '.join(files)}"
    return found


def run(step: Step, folder: Path, python: str = sys.executable) -> list[str]:
    """Run a command, on as many hosts as the page has; return the output of each."""
    for name, text in step.files.items():
        (folder / name).write_text(text)
    port = _free_port()
    words = [word.replace("node0:29400", f"{own_address()}:{port}") for word in step.command]
    command = [python, *(words[1:] if words[0] == "python" else ["-m", *words])]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONWARNINGS"] = "ignore"  # printed by Paddle when it is imported
    jobs = []
    try:
        jobs.extend(
            subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(2 if "--nnodes" in words else 1)
        )
        return [job.communicate(timeout=_WITHIN_S)[0].replace(str(folder) + "/", "") for job in jobs]
    finally:
        for job in jobs:
            job.terminate()  # ends the ranks, too
            job.communicate(timeout=_WITHIN_S)


def words_of(output: str) -> Counter[str]:
    """The lines of an output without numbers and without their order, which differs from run to run.

    The slow rank, whether there was one, and whether the hosts connected within 10 s depend on the load of
    the machine.
    """
    output = _ON_A_SLOW_RANK.sub("", output)
    output = _ON_OTHER_HOSTS.sub("", output)
    output = _OF_TORCHS_AGENT.sub("", output)
    output = re.sub(r"`paceline trace \w+`", "`paceline trace #`", output)
    return Counter(_NUMBER.sub("#", line.rstrip()) for line in output.splitlines() if line.strip())


def own_address() -> str:
    """An address of this machine that is not its loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "localhost"
        address: str = asked.getsockname()[0]
    return address


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def main() -> None:
    """Write the output of their commands into the named pages."""
    for name in sys.argv[1:]:
        page = FOLDER / f"{name}.md"
        with tempfile.TemporaryDirectory() as folder:
            done = [(step, run(step, Path(folder))) for step in steps(page)]
        text = page.read_text()
        for step, outputs in reversed(done):
            for (begin, end), output in reversed(list(zip(step.spans, outputs))):
                text = text[:begin] + output.strip("\n") + "\n" + text[end:]
        page.write_text(text)


if __name__ == "__main__":
    main()
