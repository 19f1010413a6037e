"""Errors: one tree, rows in a fixed order, facts as attributes, and nothing lost between processes."""

from __future__ import annotations

import copy
import doctest
import inspect
import pickle
import traceback
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline import errors
from paceline.errors import DeadlineError, PacelineError, PeerLostError, format_ranks

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PacelineError)]
ROWS = ("where", "seen", "expected", "got", "likely", "hint")


def late_peer() -> DeadlineError:
    return DeadlineError(
        "all_reduce: rank 3 of 8 gave up on rank 5 after 30.0 s.",
        where="group 'world', call #1841",
        seen="ranks 0-4, 6, 7 arrived",
        hint="`paceline stacks 48121` shows where\n`timeout_s` gives it longer",
        late=(5,),
        rank=3,
    )


def test_message_has_the_summary_then_the_rows_that_are_known():
    assert str(late_peer()) == (
        "all_reduce: rank 3 of 8 gave up on rank 5 after 30.0 s.\n"
        "  where    group 'world', call #1841\n"
        "  seen     ranks 0-4, 6, 7 arrived\n"
        "  hint     `paceline stacks 48121` shows where\n"
        "           `timeout_s` gives it longer"
    )


def test_facts_are_attributes():
    error = late_peer()
    assert (error.late, error.rank) == ((5,), 3)
    assert error.likely == ""
    assert PeerLostError("gone").lost == ()


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_every_error_travels_whole(kind, travel):
    rows = {row: f"the {row}" for row in ROWS}
    error = kind("what happened", **rows, lost=(1, 2))
    copied = travel(error)
    assert type(copied) is kind
    assert str(copied) == str(error)
    assert copied.lost == (1, 2)
    assert {row: getattr(copied, row) for row in ROWS} == rows


def test_cause_is_kept():
    with pytest.raises(errors.RegionError) as caught:
        try:
            raise OSError("no space")
        except OSError as error:
            raise errors.RegionError("cannot reserve") from error
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    "kind, builtin",
    [
        (errors.ConfigError, ValueError),
        (errors.RegionError, MemoryError),
        (errors.DeadlineError, TimeoutError),
        (errors.PacelineError, RuntimeError),
    ],
)
def test_callers_may_catch_the_builtin(kind, builtin):
    assert issubclass(kind, builtin)
    with pytest.raises(builtin, match="what"):
        raise kind("what")


def test_the_drawn_tree_is_the_real_one():
    """The docstring's tree, read by its indentation, is the class tree."""
    drawn = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        name = next((word for word in line.split() if hasattr(errors, word)), None)
        if name is None:
            continue
        depth = (line.index(name) - 4) // 4
        parents[depth:] = [name]
        drawn[name] = parents[depth - 1] if depth else "RuntimeError"
    real = {kind.__name__: kind.__bases__[0].__name__ for kind in ALL}
    assert drawn == real


def test_format_ranks_doctest():
    assert doctest.testmod(errors).failed == 0


@given(st.sets(st.integers(0, 127)))
def test_format_ranks_names_exactly_these(ranks):
    word, _, spelled = format_ranks(ranks).partition(" ")
    if not ranks:
        assert (word, spelled) == ("no", "rank")
        return
    assert word == ("rank" if len(ranks) == 1 else "ranks")
    named = []
    for run in spelled.split(", "):
        first, _, last = run.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(ranks)


@pytest.mark.parametrize(("error", "is_cut"), [(PacelineError("ours"), True), (ValueError("theirs"), False)])
def test_the_traceback_of_our_error_ends_where_we_were_called(error: Exception, is_cut: bool) -> None:
    names: dict[str, object] = {"error": error}
    inner = "def wrap():\n    check()\ndef check():\n    raise error\n"
    exec(compile(inner, f"{paceline.__path__[0]}/inner.py", "exec"), names)
    with pytest.raises(type(error)) as caught:
        exec(compile("def step():\n    wrap()\nstep()\n", "user.py", "exec"), names)
    errors.leave_out_inner_frames(caught.value)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[1:] == ["<module>", "step", *([] if is_cut else ["wrap", "check"])]


def test_the_line_of_the_program_is_no_row_of_a_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors.warn("One line.")
        errors.warn("What has happened.\n  hint     do something")
    short, long = (warnings.formatwarning(w.message, w.category, w.filename, w.lineno) for w in caught)
    assert short.splitlines()[1].strip() == 'errors.warn("One line.")'
    *_, hint, blank, line = long.splitlines()
    assert (hint, blank) == ("  hint     do something", "") and line.strip().startswith("errors.warn(")
