"""The names that users may import, and that messages and pages do import. Read from the source text."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.collectives.group import Group

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
REFERENCE = ROOT / "docs" / "api"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# They report on internals, or on the past.
NOT_FOR_USERS = ("docs/design/", "docs/changelog.md", "docs/_build/")


def path_of(module: str) -> Path:
    path = SOURCE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def exports_of(path: Path) -> list[str] | None:
    """Its `__all__`; None: it has none."""
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


@functools.cache
def public_modules() -> list[str]:
    """The public names, in the reference's list."""
    modules = re.findall(r"^\| `([\w.]+)` \|", (REFERENCE / "index.md").read_text(), re.MULTILINE)
    assert "paceline.torch" in modules
    return modules


def names_in(path: Path) -> set[str]:
    """The names that a module defines or imports, and those that it imports at first use."""
    names = set()
    for node in parsed(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            names |= set(ast.literal_eval(node.value))
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
    return names


def is_public(dotted: str) -> bool:
    """A public module, or a name in the `__all__` of one, or an attribute of that."""
    modules = public_modules()
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        if (module := ".".join(parts[:end])) in modules:
            return end == len(parts) or parts[end] in (exports_of(path_of(module)) or ())
    return False


def imports_in(text: str) -> Iterator[str]:
    """Dotted names that lines of a text import from Paceline; the text may be prose or a diff."""
    for module, names in re.findall(r"\bfrom (paceline[\w.]*) import ((?:\w+(?: as \w+)?(?:, )?)+)", text):
        yield from (f"{module}.{name.split(' as ')[0]}" for name in names.split(", ") if name)
    yield from re.findall(r"\bimport (paceline(?:\.\w+)*)", text)


def test_public_is_what_has_an_all_and_the_reference_lists_it():
    with_all = {module_of(path) for path in SOURCE.rglob("*.py") if exports_of(path) is not None}
    assert with_all == set(public_modules())


def test_each_folder_that_is_not_public_says_so():
    silent = [
        module_of(path)
        for path in (SOURCE / "paceline").rglob("__init__.py")
        if ("Not public." in (ast.get_docstring(parsed(path)) or "")) == (module_of(path) in public_modules())
    ]
    assert not silent


@pytest.mark.parametrize("module", public_modules())
def test_what_is_exported_is_there_sorted_and_in_the_reference(module):
    exports = exports_of(path_of(module))
    assert exports and len(set(exports)) == len(exports)
    assert set(exports) <= names_in(path_of(module))
    text = "".join(path.read_text() for path in REFERENCE.glob("*.md"))
    is_whole = f".. automodule:: {module}\n   :members:" in text
    assert is_whole or not [
        name for name in exports if not re.search(rf":: {name}\n", text) and name != "__version__"
    ]


def test_messages_and_pages_import_public_names_only():
    texts = {
        str(path.relative_to(ROOT)): path.read_text()
        for path in [*PAGES, *sorted((ROOT / "examples").glob("*.py"))]
    }
    imported = {(name, each) for name, text in texts.items() for each in imports_in(text)}
    assert len(imported) > 20
    assert not [(name, each) for name, each in sorted(imported) if not is_public(each)]
    named = {
        (name, each)
        for name, text in texts.items()
        if not name.startswith(NOT_FOR_USERS)
        for each in re.findall(r"`(paceline(?:\.\w+)+)", text)
    }
    assert len(named) > 5
    assert not [(name, each) for name, each in sorted(named) if not is_public(each)]


def test_errors_and_hints_name_what_is_public():
    """Modules that a message names; docstrings, and programs for other processes, are not for users."""
    wrong = []
    for path in sorted((SOURCE / "paceline").rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.keyword) and node.arg in ("hint", "likely", "seen", "expected"):
                for each in re.findall(r"\b(paceline(?:\.(?!pth\b)\w+)+)", ast.unparse(node.value)):
                    wrong += [] if is_public(each) else [f"{path}:{node.value.lineno}: {each}"]
    assert not wrong


def test_a_group_shows_no_addresses():
    """The core's end of the group, which takes them, is not public."""
    tree = ast.parse(path_of("paceline.collectives.group").read_text())
    (group,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Group")
    assigned = {
        target.attr
        for node in ast.walk(group)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    }
    public = {name for name in assigned | set(vars(Group)) if not name.startswith("_")}
    assert {"rank", "world_size", "name", "all_reduce"} <= public
    assert not {name for name in public if "core" in name or "pointer" in name}


def test_the_rules_see_what_breaks_them():
    assert list(imports_in("+ from paceline.torch.ddp.join import Join as J, other")) == [
        "paceline.torch.ddp.join.Join",
        "paceline.torch.ddp.join.other",
    ]
    assert not is_public("paceline.torch.ddp.join.Join") and not is_public("paceline.errors.format_ranks")
    assert is_public("paceline.torch.DistributedDataParallel.no_sync") and is_public(
        "paceline.torch.compression"
    )
