"""Paceline's class replaces another one in every module that holds it, or will, of a made-up framework."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType, SimpleNamespace

import pytest

from paceline import replace_class
from paceline.errors import ConfigError
from paceline.import_hook import unwatch_imports, watch_imports
from paceline.replace_class import Pair, replace


@pytest.fixture
def framework(tmp_path, monkeypatch):
    """`madeup.wrap` defines Wrapper, `madeup` and `early` have bound it, `late` is on disk."""

    class Wrapper:
        def __init__(self, model):
            self.model = model

    class Ours(Wrapper):
        def __init__(self, model, more=0):
            super().__init__(model)
            self.more = more

    Wrapper.__module__ = "madeup.wrap"
    modules = {name: ModuleType(name) for name in ("madeup", "madeup.wrap", "early")}
    modules["madeup"].Wrapper = modules["madeup.wrap"].Wrapper = modules["early"].TheirName = Wrapper
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "late.py").write_text(
        "from madeup.wrap import Wrapper as W\nloader_while_running = __loader__\n"
    )
    (tmp_path / "trigger.py").write_text("")
    (tmp_path / "outer.py").write_text("import trigger\nfrom madeup.wrap import Wrapper as W\n")
    (tmp_path / "broken.py").write_text("raise ValueError('of its own')\n")
    monkeypatch.syspath_prepend(tmp_path)
    pair = Pair("madeup.Wrapper", Wrapper, Ours)
    yield SimpleNamespace(
        Wrapper=Wrapper, Ours=Ours, pair=pair, **{n.replace(".", "_"): m for n, m in modules.items()}
    )
    for each in list(replace_class._active.values()):
        each.undo()
    for name in ("late", "outer", "trigger"):
        sys.modules.pop(name, None)


def test_modules_that_hold_the_class_and_modules_that_come_later_get_ours(framework):
    replaced = replace([framework.pair])
    late = importlib.import_module("late")
    assert framework.madeup.Wrapper is framework.early.TheirName is late.W is framework.Ours
    assert framework.madeup_wrap.Wrapper is framework.Wrapper  # Paceline's class has it as a base
    assert sorted(replaced.places) == ["early.TheirName", "late.W", "madeup.Wrapper"]


def test_a_module_that_is_half_imported_when_classes_are_replaced_gets_ours(framework):
    """Like a library that is the first to import torch, and binds the class further down."""

    def bring_in(module):
        if module.__name__ == "trigger":
            replace([framework.pair])

    watch_imports(bring_in)
    try:
        outer = importlib.import_module("outer")
    finally:
        unwatch_imports(bring_in)
    assert outer.W is framework.Ours


def test_undo_restores_everything(framework):
    finders, init = list(sys.meta_path), framework.Ours.__init__
    with replace([framework.pair]):
        late = importlib.import_module("late")
    assert framework.madeup.Wrapper is framework.early.TheirName is late.W is framework.Wrapper
    assert sys.meta_path == finders and framework.Ours.__init__ is init
    assert replace([framework.pair]).places  # and it can be done again


def test_a_name_that_was_changed_since_stays_changed(framework):
    with replace([framework.pair]):
        framework.early.TheirName = int
    assert framework.early.TheirName is int


def test_models_that_are_wrapped_are_counted(framework):
    replaced = replace([framework.pair])
    wrapped = framework.madeup.Wrapper("model", more=3)
    assert (wrapped.model, wrapped.more, replaced.wrapped) == ("model", 3, 1)
    with pytest.raises(TypeError):
        framework.madeup.Wrapper()
    assert replaced.wrapped == 1


def test_imports_look_as_if_unobserved(framework):
    replace([framework.pair])
    assert importlib.util.find_spec("late").loader.get_code("late") is not None  # python -m asks for it
    late = importlib.import_module("late")
    for loader in (late.__loader__, late.__spec__.loader, late.loader_while_running):
        assert type(loader) is SourceFileLoader
    with pytest.raises(ValueError, match="of its own"):
        importlib.import_module("broken")
    assert importlib.util.find_spec("no_such_module") is None


def test_the_same_again_is_the_same(framework):
    assert replace([framework.pair]) is replace([framework.pair])


def test_two_replacements_at_once_are_refused(framework):
    replace([framework.pair])
    other = Pair("early.TheirName", framework.Wrapper, framework.Ours, is_wrapper=False)
    with pytest.raises(ConfigError, match=r"early\.TheirName is replaced already"):
        replace([framework.pair, other][::-1])


def test_a_class_that_another_library_has_replaced_is_refused(framework):
    framework.madeup.Wrapper = SimpleNamespace
    with pytest.raises(ConfigError, match="not the framework's own class") as raised:
        replace([framework.pair])
    assert "types.SimpleNamespace" in str(raised.value)
    assert framework.early.TheirName is framework.Wrapper


SAID = "paceline: replaced madeup.Wrapper, bound in 2 modules.\n"


@pytest.mark.parametrize(("rank", "text"), [("0", SAID), ("1", ""), (None, SAID)])
def test_rank_0_says_what_was_replaced(framework, rank, text, monkeypatch, capsys):
    set_rank(monkeypatch, rank)
    replace([framework.pair])
    assert capsys.readouterr().err == text


@pytest.mark.parametrize(("local_rank", "text"), [(None, SAID), ("1", "")])
def test_without_ranks_it_is_said_when_a_model_is_wrapped(framework, local_rank, text, monkeypatch, capsys):
    """torchrun's own process sees the variable, too, and must be silent."""
    set_rank(monkeypatch, None)
    monkeypatch.setenv("PACELINE_REPLACE_DDP", "1")
    if local_rank is not None:  # Lightning sets it in the processes that it starts, and no RANK
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    replace([framework.pair])
    assert capsys.readouterr().err == ""
    for _ in range(2):
        framework.madeup.Wrapper("model")
    assert capsys.readouterr().err == text


def set_rank(monkeypatch, rank):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")


def test_the_warning_at_the_end_names_subclasses_of_the_other_class(framework, monkeypatch, capsys):
    set_rank(monkeypatch, "0")
    replaced = replace([framework.pair])
    theirs = type("Theirs", (framework.Wrapper,), {"__module__": "early"})  # not seen at the beginning
    theirs("model")
    capsys.readouterr()
    replaced._say_if_for_nothing(os.getpid())
    text = capsys.readouterr().err
    assert "no model was wrapped in what replaced madeup.Wrapper" in text
    assert "in a subclass of the framework's class: early.Theirs" in text
    framework.madeup.Wrapper("model")
    replaced._say_if_for_nothing(os.getpid())
    assert capsys.readouterr().err == ""


def test_a_subclass_that_was_made_before_is_named(framework, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    kept = type("Theirs", (framework.Wrapper,), {"__module__": "early"})  # else it may be collected
    replace([framework.pair])
    assert f"early.{kept.__name__} is a subclass that was made before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (None, (False, False)),
        ("", (False, False)),
        ("0", (False, False)),
        ("1", (True, False)),
        ("sampler", (True, True)),
    ],
)
def test_what_the_variable_asks_for(value, answer, monkeypatch):
    monkeypatch.delenv("PACELINE_REPLACE_DDP", raising=False)
    if value is not None:
        monkeypatch.setenv("PACELINE_REPLACE_DDP", value)
    assert replace_class.asked_by_environment() == answer


def test_a_value_that_means_nothing_is_refused(monkeypatch):
    monkeypatch.setenv("PACELINE_REPLACE_DDP", "yes")
    with pytest.raises(ConfigError, match="PACELINE_REPLACE_DDP=yes is not usable"):
        replace_class.asked_by_environment()
