"""What both front ends need stands once, below them: no six lines are the same in torch/ and in paddle/."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "paceline"
LEAST = 6

# Runs that are users' own surface, which each framework's reference shows in full: files of torch/ and of
# paddle/, and the first line that both have.
ALLOWED = {
    # Arguments of torch's constructor, which both classes take, by name and in its order.
    ("ddp/distributed.py", "ddp/distributed.py", "bucket_cap_mb: float | None = None,"),
}

Line = tuple[int, str]


def spoken(text: str) -> list[Line]:
    """Numbered lines that say something; comments, imports and `__all__` are passed over, spaces folded."""
    return list(folded(text, passed_over(ast.parse(text))))


def of_any_framework(text: str) -> list[Line]:
    """The same without docstrings, and with one name for both frameworks and for what they call a model."""
    tree = ast.parse(text)
    skipped = passed_over(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped |= span(node)
    return [
        (number, re.sub(r"\b(Module|Layer)\b", "Model", re.sub("[Tt]orch|[Pp]addle", "framework", line)))
        for number, line in folded(text, skipped)
    ]


def passed_over(tree: ast.Module) -> set[int]:
    numbers: set[int] = set()
    for node in ast.walk(tree):
        is_export = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if is_export or isinstance(node, ast.Import | ast.ImportFrom):
            numbers |= span(node)
    return numbers


def span(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def folded(text: str, skipped: set[int]) -> Iterator[Line]:
    for number, line in enumerate(text.splitlines(), 1):
        said = " ".join(line.partition("  #")[0].split())
        if number not in skipped and not said.startswith("#") and re.search(r"\w", said):
            yield number, said


def shared_runs(one: list[Line], other: list[Line]) -> Iterator[tuple[int, int, list[str]]]:
    """Runs of lines that both have: where each begins, and the lines."""
    ours, theirs = [line for _, line in one], [line for _, line in other]
    places: dict[str, list[int]] = {}
    for j, line in enumerate(theirs):
        places.setdefault(line, []).append(j)
    for i, line in enumerate(ours):
        for j in places.get(line, ()):
            if i and j and ours[i - 1] == theirs[j - 1]:
                continue  # in the midst of a run
            length = 0
            while ours[i + length : i + length + 1] == theirs[j + length : j + length + 1] != []:
                length += 1
            if length >= LEAST:
                yield one[i][0], other[j][0], ours[i : i + length]


@functools.cache
def twins(read: Callable[[str], list[Line]]) -> list[tuple[tuple[str, str, str], str]]:
    """Each run with its key in ALLOWED, and where it stands, in words."""
    sides = {
        framework: [
            (str(path.relative_to(PACKAGE / framework)), read(path.read_text()))
            for path in sorted((PACKAGE / framework).rglob("*.py"))
        ]
        for framework in ("torch", "paddle")
    }
    return [
        ((name, other, lines[0]), f"torch/{name}:{begin} paddle/{other}:{start}: {len(lines)} lines")
        for name, one in sides["torch"]
        for other, two in sides["paddle"]
        for begin, start, lines in shared_runs(one, two)
    ]


@pytest.mark.parametrize("read", [spoken, of_any_framework])
def test_no_six_lines_stand_in_both_front_ends(read):
    wrong = [where for key, where in twins(read) if key not in ALLOWED]
    assert not wrong, "\n".join(wrong)


def test_what_is_allowed_is_there():
    assert {key for key, _ in twins(spoken)} == ALLOWED


def test_a_twin_is_found_under_other_names():
    one = "import torch\n\ndef f(x):\n" + "".join(f"    x.{name}(torch.zeros(1))\n" for name in "abcdef")
    other = one.replace("torch", "paddle").replace("\n    x.c", "\n\n    # Why.\n    x.c")
    assert not list(shared_runs(spoken(one), spoken(other)))
    ((begin, start, lines),) = shared_runs(of_any_framework(one), of_any_framework(other))
    assert (begin, start, len(lines)) == (3, 3, 7)
    shorter = other.replace("    x.d(paddle.zeros(1))\n", "")
    assert not list(shared_runs(of_any_framework(one), of_any_framework(shorter)))
