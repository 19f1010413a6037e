"""PACELINE_FREEZE_IMPORTS: a framework is imported without garbage collections. In processes of their own,
with a small module in torch's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

FRAMEWORK = """
    import gc
    enabled = gc.isenabled()
    import part
    class Node: pass
    nodes = [Node() for _ in range(1000)]
"""
PROGRAM = """
    import gc, json, sys
    try:
        import torch
        seen = [torch.enabled, torch.part.enabled]
    except ImportError as error:
        seen = [str(error)]
    loader = torch.__spec__.loader if "torch" in sys.modules else None
    print(json.dumps([seen, gc.isenabled(), gc.get_freeze_count() > 1000, type(loader).__name__]))
"""


@pytest.fixture
def answer(tmp_path):
    """What PROGRAM prints: what the import saw, if it collects, if much is frozen, and torch's loader."""
    (tmp_path / "torch.py").write_text(textwrap.dedent(FRAMEWORK))
    (tmp_path / "part.py").write_text("import gc; enabled = gc.isenabled()")

    def run(before: str = "", **variables: str):
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(before) + textwrap.dedent(PROGRAM))
        environment = {name: text for name, text in os.environ.items() if not name.startswith("PACELINE_")}
        ended = subprocess.run(
            [sys.executable, str(program)],
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return json.loads(ended.stdout)

    run.folder = tmp_path
    return run


def test_collections_rest_during_the_import_and_what_came_is_frozen(answer):
    seen, collects, is_frozen, loader = answer(PACELINE_FREEZE_IMPORTS="1")
    assert seen == [False, False]
    assert collects and is_frozen
    assert loader == "SourceFileLoader"  # as if nobody had looked on


@pytest.mark.parametrize("variables", [{}, {"PACELINE_FREEZE_IMPORTS": "0"}, {"PACELINE_FREEZE_IMPORTS": ""}])
def test_without_the_variable_nothing_changes(answer, variables):
    assert answer(**variables) == [[True, True], True, False, "SourceFileLoader"]


def test_a_program_that_wants_no_collections_keeps_its_way(answer):
    seen, collects, is_frozen, _ = answer("import gc; gc.disable()\n", PACELINE_FREEZE_IMPORTS="1")
    assert seen == [False, False]
    assert not collects and not is_frozen


def test_an_import_that_fails_leaves_collections_on(answer):
    (answer.folder / "part.py").write_text("raise ImportError('no such library')")
    seen, collects, _, _ = answer(PACELINE_FREEZE_IMPORTS="1")
    assert seen == ["no such library"]
    assert collects


def test_paceline_run_sets_it_and_the_user_decides(tmp_path):
    (tmp_path / "program.py").write_text("import os; print('is', os.environ['PACELINE_FREEZE_IMPORTS'])")
    for given, expected in (({}, "is 1"), ({"PACELINE_FREEZE_IMPORTS": "0"}, "is 0")):
        environment = {n: t for n, t in os.environ.items() if n != "PACELINE_FREEZE_IMPORTS"} | given
        command = [sys.executable, "-m", "paceline", "run", "-n", "2", str(tmp_path / "program.py")]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=240, check=True
        )
        assert ended.stdout.count(expected) == 2, ended.stdout
