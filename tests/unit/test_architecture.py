"""The folders follow the architecture. Read from source text: nothing here imports the code it checks."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "paceline"

# Top to bottom: a layer imports from layers below it and from itself. Folders that share a row do not import
# each other, except in the bottom row.
LAYERS = (
    ("paceline.integrations",),  # only its users import it
    ("paceline.__main__",),
    ("paceline.cli",),
    ("paceline.predict",),
    ("paceline",),
    ("paceline.torch", "paceline.paddle"),
    ("paceline.tune",),
    ("paceline.doctor", "paceline.ray"),
    ("paceline.launch",),
    ("paceline.monitor",),
    ("paceline.data",),
    ("paceline.ddp",),
    ("paceline.checkpoint",),
    ("paceline.sharding",),
    ("paceline.reducer",),
    ("paceline.collectives",),
    ("paceline.health",),
    ("paceline.rendezvous",),
    ("paceline.trace",),
    (
        "paceline.errors",
        "paceline.arguments",
        "paceline.env",
        "paceline.launchers",
        "paceline.stacks",
        "paceline.units",
        "paceline.replace_class",
        "paceline.import_hook",
        "paceline.versions",
        "paceline._core",
    ),
)
BOTTOM = len(LAYERS) - 1
# The parts of a front end (folders, and files beside them), top to bottom: a part imports from rows below it
# and from itself. So the longest chain of imports has as many parts as there are rows.
ROOMS = {
    "torch": (
        ("__init__",),
        ("ddp",),
        ("backward", "backend", "compression", "sync_batch_norm"),
        ("sharding",),
        ("checkpoint", "communicator", "data_parallel", "tensorboard"),
        ("ops",),
        ("model", "versions"),
    ),
    "paddle": (
        ("__init__",),
        ("ddp", "sync_batch_norm"),
        ("backward", "compression"),
        ("sharding",),
        ("checkpoint", "communicator"),
        ("ops",),
        ("model",),
        ("internals", "versions"),
    ),
}
# The same for the reducer. Files that are not named make one more row, and use none of these.
REDUCER = (
    ("local_sgd",),
    ("backward", "between_hosts"),
)


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> tuple[int, str]:
    """Its row in LAYERS, and the entry there that it belongs to."""
    matches = [
        (len(entry), row, entry)
        for row, entries in enumerate(LAYERS)
        for entry in entries
        if module == entry or (entry != "paceline" and module.startswith(f"{entry}."))
    ]
    if not matches:
        raise AssertionError(f"{module} is in no row of LAYERS")
    _, row, entry = max(matches)
    return row, entry


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """Line and full module name of each import, at whatever depth it stands."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            module = ".".join(filter(None, [base if node.level else "", node.module]))
            found += [(node.lineno, whole_name(module, alias.name)) for alias in node.names]
    return found


def whole_name(module: str, name: str) -> str:
    """`from a import b` imports module a.b if there is one, else a."""
    folder = PACKAGE.parent.joinpath(*module.split("."))
    is_module = (folder / f"{name}.py").exists() or (folder / name).is_dir() or name == "_core"
    return f"{module}.{name}" if is_module else module


def spell(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def test_imports_point_down_only():
    wrong = []
    for path in python_files():
        row, entry = layer_of(module_of(path))
        for line, imported in imports_of(path):
            if imported.split(".")[0] in ("benchmarks", "tests"):
                wrong.append(spell(path, line, f"the wheel imports {imported}, which is not in it"))
            if imported.split(".")[0] != "paceline":
                continue
            below, other = layer_of(imported)
            if below < row or (below == row and other != entry and row != BOTTOM):
                wrong.append(spell(path, line, f"{entry} imports {imported}, which is not below it"))
    assert not wrong, "\n".join(wrong)


def test_an_integration_stands_alone():
    """A file of a library imports no other library's: a user may have only one of them."""
    wrong = [
        spell(path, line, f"imports {imported}")
        for path in sorted((PACKAGE / "integrations").glob("*.py"))
        for line, imported in imports_of(path)
        if imported.startswith("paceline.integrations.")
        if imported not in ("paceline.integrations.versions", module_of(path))
    ]
    assert not wrong, "\n".join(wrong)


def room_of(module: str, framework: str) -> str:
    """The folder, or the file beside the folders, that a module of a front end is in."""
    name, *_ = [*module.removeprefix(f"paceline.{framework}").strip(".").split("."), ""]
    return name or "__init__"


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_each_room_of_a_front_end_imports_from_rooms_below(framework):
    rows = {room: row for row, rooms in enumerate(ROOMS[framework]) for room in rooms}
    wrong = []
    for path in sorted((PACKAGE / framework).rglob("*.py")):
        room = room_of(module_of(path), framework)
        for line, imported in imports_of(path):
            if imported.split(".")[:2] != ["paceline", framework]:
                continue
            other = room_of(imported, framework)
            if other != room and rows[other] <= rows[room]:
                wrong.append(spell(path, line, f"{room} imports {other}, which is not below it"))
    assert not wrong, "\n".join(wrong)


def test_each_folder_of_the_reducer_imports_from_those_below():
    rows = {room: row for row, rooms in enumerate(REDUCER) for room in rooms}
    assert {path.name for path in (PACKAGE / "reducer").iterdir() if (path / "__init__.py").exists()} == set(
        rows
    )
    wrong = []
    for path in sorted((PACKAGE / "reducer").rglob("*.py")):
        room = room_of(module_of(path), "reducer")
        for line, imported in imports_of(path):
            if imported.split(".")[:2] != ["paceline", "reducer"]:
                continue
            other = room_of(imported, "reducer")
            if other != room and other in rows and rows[other] <= rows.get(room, len(REDUCER)):
                wrong.append(spell(path, line, f"{room} imports {other}, which is not below it"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_only_the_front_end_imports_its_framework(framework):
    wrong = [
        spell(path, line, f"imports {imported}")
        for path in python_files()
        if layer_of(module_of(path))[1] != f"paceline.{framework}"
        for line, imported in imports_of(path)
        if imported.split(".")[0] == framework
    ]
    assert not wrong, "\n".join(wrong)


def test_only_bind_includes_python():
    wrong = [
        spell(path, number, line)
        for path in sorted((ROOT / "cpp").rglob("*.[ch]*"))
        if path.parent.name != "bind"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.startswith("#include") and ("Python.h" in line or "nanobind" in line)
    ]
    assert not wrong, "\n".join(wrong)


def test_import_paceline_is_light():
    heavy = ("torch", "paddle", "rich", "matplotlib", "sklearn", "cloudpickle", "multiprocessing.forkserver")
    code = f"import paceline, sys; print([name for name in {heavy!r} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[]"


def test_every_public_name_has_a_docstring():
    """And every module."""
    exported = {name for path in python_files() if path.name == "__init__.py" for name in exports_of(path)}
    wrong = []
    for path in python_files():
        tree = parsed(path)
        if not ast.get_docstring(tree):
            wrong.append(spell(path, 1, "the module has none"))
        for node in public_definitions(tree):
            is_class = isinstance(node, ast.ClassDef)
            if not ast.get_docstring(node) and node.name in exported:
                wrong.append(spell(path, node.lineno, node.name))
            if is_class and node.name in exported:
                wrong += [
                    spell(path, method.lineno, f"{node.name}.{method.name}")
                    for method in public_definitions(node)
                    if not ast.get_docstring(method)
                ]
    assert not wrong, "\n".join(wrong)


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def exports_of(path: Path) -> list[str]:
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def public_definitions(parent: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    """Functions and classes that need a docstring; overloads and setters have theirs elsewhere."""
    for node in parent.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
            if not decorators & {"overload", "setter"}:
                yield node
