"""The folders are the architecture. Read from the source text: nothing here imports what it checks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from tests.conftest import LONGEST_FILES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "paceline"

# Top to bottom, as drawn in docs/design/gradient.md: a layer imports from layers below it and from itself.
# Folders that share a row do not import each other, but for the bottom row.
LAYERS = (
    ("paceline.integrations",),  # imported by its users only
    ("paceline.__main__",),
    ("paceline.cli",),
    ("paceline",),
    ("paceline.torch", "paceline.paddle"),
    ("paceline.tune",),
    (
        "paceline.bench",
        "paceline.doctor",
        "paceline.ray",
    ),  # it measures all that is below; a front end adds its own contests to it
    ("paceline.launch",),
    ("paceline.data",),
    ("paceline.sharding",),
    ("paceline.reducer",),
    ("paceline.collectives",),
    ("paceline.rendezvous",),
    ("paceline.tracing",),
    (
        "paceline.errors",
        "paceline.arguments",
        "paceline.env",
        "paceline.launchers",
        "paceline.stacks",
        "paceline.replacing",
        "paceline.versions",
        "paceline._core",
    ),
)
BOTTOM = len(LAYERS) - 1
# The rooms of a front end (folders, and files beside them), top to bottom: a room imports from rows below
# it and from itself. So the longest chain of imports has as many rooms as there are rows.
ROOMS = {
    "torch": (
        ("__init__", "bench"),
        ("ddp",),
        ("passes", "one_model", "backend", "compression", "sync_batch_norm"),
        ("link", "data_parallel", "tensorboard"),
        ("model", "versions"),
    ),
    "paddle": (
        ("__init__", "bench"),
        ("ddp", "sync_batch_norm"),
        ("passes", "one_model", "compression"),
        ("link",),
        ("model",),
        ("internals", "versions"),
    ),
}
# The same for the reducer. Files that are not named make one more row, and use none of these.
REDUCER = (
    ("wrapped_model",),
    ("arguments",),
    ("local_sgd", "one_copy"),
    ("passes", "between_hosts"),
)
FILES = "the files beside them"
DRAWINGS = ROOT / "docs" / "design" / "gradient.md"
# Names that say nothing about what is in a file.
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}
LONG_LINES = 400
CODE = ("src", "cpp", "tests", "examples", "benchmarks", "scripts", "docs")


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
        raise AssertionError(f"{module} is in no layer of design.md")
    _, row, entry = max(matches)
    return row, entry


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full module name of each import, at whatever depth it stands."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            module = ".".join(filter(None, [base if node.level else "", node.module]))
            yield from ((node.lineno, whole_name(module, alias.name)) for alias in node.names)


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
            if imported.split(".")[0] != "paceline":
                continue
            below, other = layer_of(imported)
            if below < row or (below == row and other != entry and row != BOTTOM):
                wrong.append(spell(path, line, f"{entry} imports {imported}, which is not below it"))
    assert not wrong, "\n".join(wrong)


def part_of(module: str) -> str:
    """The folder or file directly in the package that a module is in."""
    return module.split(".")[1] if "." in module else module


def test_docstrings_name_what_is_imported():
    """A module that says what it imports says all; of a front end's own rooms another test knows."""
    wrong = []
    for path in python_files():
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        if not re.search(r"\b(May import|Imports)\b", docstring) or re.search(r"\bbelow\b", docstring):
            continue
        own = part_of(module_of(path))
        is_folder = path.name == "__init__.py" and path.parent.parent == PACKAGE
        for each in path.parent.rglob("*.py") if is_folder else [path]:
            for line, imported in imports_of(each):
                part = part_of(imported).lstrip("_")
                if imported.startswith("paceline.") and part not in (own, "core") and part not in docstring:
                    wrong.append(spell(path, 1, f"{part} is not named ({each.name}:{line})"))
                if imported == "paceline._core" and "core" not in docstring and not is_folder:
                    wrong.append(spell(path, 1, f"the core is not named (line {line})"))
    assert not wrong, "\n".join(wrong)


def test_an_integration_stands_alone():
    """A file of a library imports no other library's: whoever has one need not have the other."""
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
    assert framework != "torch" or len(ROOMS[framework]) == 5
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
    assert {path.name for path in (PACKAGE / "reducer").iterdir() if (path / "__init__.py").exists()} < set(
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


def drawn_rows(title: str) -> list[tuple[str, ...]]:
    """The rows of a drawing: names between bars, then at least two spaces and what they are."""
    drawing = DRAWINGS.read_text().partition(f"```\n{title}\n")[2].partition("```")[0]
    return [tuple(re.split(r" {2,}", row[2:])[0].split(" | ")) for row in drawing.splitlines()]


def test_the_drawings_show_what_the_imports_are_held_to():
    layers = [tuple(name.removeprefix("paceline.") for name in row) for row in LAYERS]
    assert drawn_rows("paceline") == layers
    for framework, rows in ROOMS.items():
        assert drawn_rows(framework) == list(rows)
    assert drawn_rows("reducer") == [*REDUCER, (FILES,)]


def test_the_drawing_of_the_readme_has_the_same_layers_in_the_same_order():
    """It leaves out the entrances, and below its second rule it shows what the core consists of."""
    layers = [tuple(name.removeprefix("paceline.") for name in row) for row in LAYERS]
    names = {name for row in layers for name in row}
    drawing = (ROOT / "README.md").read_text().partition("## How it is built")[2].split("```")[1]
    rule = re.compile("^ +─+$", re.M)
    _, rows, core = rule.split(drawing)
    drawn = [
        tuple(takewhile(names.__contains__, (word.rstrip("/") for word in row.split())))
        for row in rows.strip().splitlines()
    ]
    entrances = {"__main__", "cli", "paceline", "_core"}
    expected = [tuple(name for name in row if name not in entrances) for row in layers]
    assert drawn == [row for row in expected if row]
    assert core.strip().startswith("C++ core ")


def test_the_table_of_the_rooms_files_shows_the_folders():
    section = DRAWINGS.read_text().partition("\n### The files of the rooms\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([\w, ]+) \| (.+) \|$", section, re.M)
    shown = [f"{each.lower()}/{name}" for name, frameworks, _ in rows for each in frameworks.split(", ")]
    there = [
        str(path.relative_to(PACKAGE))
        for framework in ROOMS
        for room in ("ddp", "passes", "link", "model")
        for path in (PACKAGE / framework / room).glob("*.py")
        if path.stem != "__init__"
    ]
    assert sorted(shown) == sorted(there)


def test_the_table_of_what_a_framework_provides_shows_all_methods():
    page = (ROOT / "docs" / "design" / "reducer.md").read_text()
    section = page.partition("\n## What a framework provides\n")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ")][1:]
    shown = [name for row in rows for name in re.findall(r"`(\w+\.\w+)`", row.split("|")[2])]
    asked = {
        f"{node.name}.{method.name}"
        for node in ast.parse((PACKAGE / "reducer" / "passes" / "front_end.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in ("Tensors", "Gradients", "Sparse", "Autograd")
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    }
    assert len(rows) == 7
    assert sorted(shown) == sorted(asked)


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


def test_files_are_named_for_what_they_hold():
    """Long files are told, and do not fail: a limit sliced what belongs together."""
    wrong = []
    for top in CODE:
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix not in {".py", ".pyi", ".cc", ".h"}:
                continue
            if path.stem in VAGUE:
                wrong.append(spell(path, 1, "a name that says nothing"))
            lines = len(path.read_text().splitlines())
            if lines > LONG_LINES:
                print(spell(path, lines, "long: one idea, or two?"))
    assert not wrong, "\n".join(wrong)


def torn_comments(lines: list[str]) -> Iterator[int]:
    """Numbers of lines of C++ whose comment does not fit behind the code, and so tears it or itself apart."""
    for number, (before, line, after) in enumerate(
        zip(["", *lines], lines, [*lines[1:], ""], strict=False), 1
    ):
        code, sep, _ = line.partition("//")
        if not sep or not code.strip() or '"' in code:
            continue
        goes_on = re.match(rf"\s{{{len(code)}}}//", after) is not None
        is_tail = re.search(r"(=|<|alignas\((\w+\))?)$", before) is not None
        is_behind_a_brace = code.strip() == "}" and line.partition("//")[2].startswith("/")
        if goes_on or is_tail or is_behind_a_brace:
            yield number


def test_the_files_that_are_run_first_are_there():
    missing = [name for name in LONGEST_FILES if not (ROOT / "tests" / name).is_file()]
    assert not missing, "tests/conftest.py, LONGEST_FILES"


def test_no_comment_tears_a_declaration():
    """A comment of more than one line stands above what it is about."""
    wrong = [
        spell(path, number, "the comment belongs above the declaration")
        for top in ("cpp", "tests/cpp")
        for path in sorted((ROOT / top).rglob("*.[ch]*"))
        for number in torn_comments(path.read_text().splitlines())
    ]
    assert not wrong, "\n".join(wrong)
    torn = ["int a;  ///< ranks that", "        ///< wait", "kLeft =", "    3,  ///< closed", "}  ///< late"]
    assert list(torn_comments(torn)) == [1, 4, 5]


def test_legends_keep_their_layout():
    """The formatter leaves comments alone, and nobody else has poured a legend into lines of prose."""
    assert "ReflowComments: Never" in (ROOT / ".clang-format").read_text()
    for name, *drawn in (
        ("cpp/reducer/reducer.h", "//   chunk    a run", "//   4. chunks_done += 1         (release: "),
        ("cpp/core/control.h", "//   slab:    small buffers (2) | staging buffers (2) |"),
        ("cpp/collectives/all_reduce.cc", "//   2. meet;\n", "//     copy piece k in;  meet;\n"),
    ):
        text = (ROOT / name).read_text()
        assert not [each for each in drawn if each not in text], name


REACHES_INTO_PASSES = re.compile(r"""\._passes\b|['"]_passes['"]""")


def test_no_test_reaches_into_passes():
    """What a wrapped model does is asked by what users have, as `bucket_layout()`; else a change of its parts
    would change what is promised."""
    wrong = [
        spell(path, number, line.strip())
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if REACHES_INTO_PASSES.search(line)
    ]
    assert not wrong, "\n".join(wrong)
    assert REACHES_INTO_PASSES.search('getattr(ddp, "_passes", None)')


# Classes that are inherited from and made as well, and why.
INHERITED_AND_MADE = {
    "errors.PacelineError": "an exception: whoever catches it catches what inherits from it",
    "errors.CollectiveError": "an exception",
    "errors.ConfigError": "an exception",
    "errors.ReplicaError": "an exception",
    "data.sampler.DistributedSampler": "torch's name; users make it, and inherit from it as from torch's",
    "paddle.ddp.parallel.DataParallel": "Paddle's name; torch's name for it is the same with other arguments",
    "reducer.compression.Compression": "public for annotations; without an encoding nobody can make it",
    "paddle.link.calls.GroupCalls": "calls in memory, or of one rank, differ in how they begin",
    "torch.link.transport.ProcessGroupTransport": "a transport with a hook reduces otherwise, and no more",
}


def spelled(node: ast.expr) -> str:
    """The name of a class without its parameters: `link.Link` for `link.Link[Tensor]`."""
    return ast.unparse(node.value if isinstance(node, ast.Subscript) else node)


def inherited_and_made_in(path: Path) -> Iterator[set[str]]:
    """Classes that the classes of a file inherit from, and those that it makes or shows to users.

    Each by the module that defines it, as far as names tell: those of the file, and those that it imports.
    """
    tree = ast.parse(path.read_text(), str(path))
    nodes = list(ast.walk(tree))
    own = {node.name: module_of(path) for node in nodes if isinstance(node, ast.ClassDef)}
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    modules = {alias.asname or alias.name: node.module for node in imports for alias in node.names} | own
    origins = {name: f"{module}.{name}".removeprefix("paceline.") for name, module in modules.items()}
    bases = {spelled(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases}
    called = {spelled(node.func) for node in nodes if isinstance(node, ast.Call)}
    shown = {name for name in exports_of(path) if name[0].isupper()}
    for names in (bases, called | shown):
        yield {origins[name] for name in names if name in origins}


def test_a_class_is_abstract_or_final():
    """A class is inherited from, or it is made; a class that needs another one's work has that other one."""
    inherited: set[str] = set()
    made: set[str] = set()
    for path in python_files():
        some, others = inherited_and_made_in(path)
        inherited |= some
        made |= others
    own = {
        f"{module_of(path)}.{name}".removeprefix("paceline.")
        for path in python_files()
        for name in re.findall(r"^\s*class (\w+)", path.read_text(), re.M)
    }
    assert {
        "reducer.passes.passes.Passes",
        "reducer.passes.graphs.Graph",
    } <= made & own  # who makes a class is found
    assert inherited & made & own == INHERITED_AND_MADE.keys()
    assert "@final\nclass Passes(" in (PACKAGE / "reducer" / "passes" / "passes.py").read_text()


def test_only_the_state_of_passes_says_whether_a_backward_is_averaged():
    """Everybody else asks for it by a call, so that there is one place to look at."""
    writers = {
        str(path.relative_to(PACKAGE))
        for path in python_files()
        if re.search(r"\.is_syncing(,[^=()]*)?\s*=[^=]", path.read_text())
    }
    assert writers == {"reducer/passes/state.py"}


ORDERS = re.compile(r"memory_order_(acquire|release|acq_rel)")
PARTNER = re.compile(r"\b[Pp]artners?\b|\b[Pp]airs with\b")


def test_every_acquire_and_release_names_its_partner():
    """docs/design/core.md claims it; the comment stands at most seven lines above the operation."""
    wrong = []
    for path in sorted((ROOT / "cpp").rglob("*.[ch]*")):
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            if ORDERS.search(line) and not any(
                PARTNER.search(above) for above in lines[max(0, i - 7) : i + 1]
            ):
                wrong.append(spell(path, i + 1, line.strip()))
    assert not wrong, "\n".join(wrong)


def test_every_public_name_has_a_docstring():
    """Every module and class has one; of what a folder's __init__ exports, functions and methods too."""
    exported = {name for path in python_files() if path.name == "__init__.py" for name in exports_of(path)}
    wrong = []
    for path in python_files():
        tree = ast.parse(path.read_text(), str(path))
        if not ast.get_docstring(tree):
            wrong.append(spell(path, 1, "the module has none"))
        for node in public_definitions(tree):
            is_class = isinstance(node, ast.ClassDef)
            if not ast.get_docstring(node) and (is_class or node.name in exported):
                wrong.append(spell(path, node.lineno, node.name))
            if is_class and node.name in exported:
                wrong += [
                    spell(path, method.lineno, f"{node.name}.{method.name}")
                    for method in public_definitions(node)
                    if not ast.get_docstring(method)
                ]
    assert not wrong, "\n".join(wrong)


VERBLESS = re.compile(r'("""|^ +\w+: )(Of|That of|Those of) ')


def test_no_docstring_opens_with_of():
    """What a name stands for is said first, so that a reader need not look back at it."""
    wrong = [
        spell(path, number, line.strip())
        for path in python_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if VERBLESS.search(line)
    ]
    assert not wrong, "\n".join(wrong)


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def exports_of(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(), str(path)).body:
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
