"""The published package: one version, all extras, and a check that sees mistakes in a wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).resolve().parents[2]
NAME = "paceline-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl"
LIBRARY = "paceline/_core.cpython-311-x86_64-linux-gnu.so"
METADATA = """\
Metadata-Version: 2.2
Name: paceline
Version: 0.1.0
Requires-Dist: numpy>=1.24
Provides-Extra: torch
Requires-Dist: torch>=2.6; extra == "torch"
Provides-Extra: paddle
Provides-Extra: accelerate
Provides-Extra: lightning
Provides-Extra: transformers
Provides-Extra: ray
Provides-Extra: live

Words.
"""
CONTENT = {
    "paceline/__init__.py": "",
    "paceline/py.typed": "",
    "paceline/_core.pyi": "",
    "paceline/torch/__init__.py": "",
    LIBRARY: "library",
    "paceline-0.1.0.dist-info/METADATA": METADATA,
    "paceline-0.1.0.dist-info/WHEEL": "",
    "paceline-0.1.0.dist-info/RECORD": "",
    "paceline-0.1.0.dist-info/licenses/LICENSE": "",
}


def check(folder: Path, content: dict[str, str | bytes], name: str = NAME) -> tuple[int, str]:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in content.items():
            archive.writestr(member, text)
    command = [sys.executable, str(ROOT / "scripts" / "check-wheel"), str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stderr


def test_a_wheel_as_it_should_be_passes(tmp_path):
    assert check(tmp_path, CONTENT) == (0, "")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"paceline/large.bin": b"x" * 2_000_000}, "more than 2000000"),
        ({"torch/__init__.py": ""}, "do not belong"),
        ({"paceline/__pycache__/env.pyc": ""}, "do not belong"),
        ({"paceline.libs/libtorch-1.so": ""}, "must be one library"),
        ({LIBRARY: None}, "must be one library"),
        ({"paceline.pth": "import os"}, "do not belong"),  # no code of ours runs when Python starts
        ({"paceline/py.typed": None}, "missing: ['paceline/py.typed']"),
        ({"paceline-0.1.0.dist-info/METADATA": None}, "METADATA is missing"),
        (
            {"paceline-0.1.0.dist-info/METADATA": METADATA.replace(">=1.24", ">=1.24\nRequires-Dist: torch")},
            "numpy alone",
        ),
        (
            {"paceline-0.1.0.dist-info/METADATA": METADATA.replace('; extra == "torch"', "")},
            "does not ask for torch",
        ),
        (
            {"paceline-0.1.0.dist-info/METADATA": METADATA.replace("Provides-Extra: paddle\n", "")},
            "some are missing",
        ),
    ],
)
def test_what_is_wrong_with_a_wheel_is_named(tmp_path, change, complaint):
    content = {name: text for name, text in (CONTENT | change).items() if text is not None}
    status, message = check(tmp_path, content)
    assert status == 1
    assert complaint in message


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (NAME.replace("manylinux_2_34", "linux"), "run auditwheel repair"),
        (NAME.replace("x86_64", "aarch64"), "is not for cp311-cp311 on aarch64"),
        (NAME.replace("cp311", "cp312"), "is not for cp312-cp312 on x86_64"),
        ("paceline-0.1.0-py3-none-any.whl", "one CPython"),
    ],
)
def test_a_name_that_does_not_fit_is_reported(tmp_path, name, complaint):
    status, message = check(tmp_path, CONTENT, name)
    assert status == 1
    assert complaint in message


def test_the_version_is_the_same_everywhere():
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert project and citation
    assert project[1] == citation[1] == paceline.__version__


def test_the_extras_that_are_checked_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    table = project.partition("[project.optional-dependencies]")[2].partition("\n\n")[0]
    extras = set(re.findall(r"^(\w+) = ", table, re.MULTILINE))
    checked = re.search(r"^EXTRAS = \{(.+)\}$", (ROOT / "scripts" / "check-wheel").read_text(), re.MULTILINE)
    assert checked
    of_developers = {"bench", "demo", "notebook", "test", "docs", "dev"}
    assert extras - of_developers == set(re.findall(r'"(\w+)"', checked[1]))
