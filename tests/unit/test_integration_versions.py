"""A library of a version that Paceline's part for it was not tested with is named, once, and still works."""

from __future__ import annotations

import warnings
from importlib import metadata

import pytest

from paceline.errors import ConfigError
from paceline.integrations import versions


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(versions, "_warned", set())


def warned(monkeypatch, installed: str, oldest: str = "2.5", newest: str = "2.10") -> list[str]:
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            versions.warn_if_untested("lightning", oldest, newest)
    assert all(issubclass(each.category, versions.UntestedVersionWarning) for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("installed", ["2.5.0", "2.9.1.post2", "2.10.99", "2.6"])
def test_a_tested_version_is_no_news(monkeypatch, installed):
    assert warned(monkeypatch, installed) == []


@pytest.mark.parametrize("installed", ["2.4.9", "2.11.0", "3.0.0rc1", "1.9"])
def test_an_untested_version_is_named_once_with_the_range(monkeypatch, installed):
    (text,) = warned(monkeypatch, installed)
    assert f"got      lightning {installed}" in text
    assert "expected lightning 2.5 to 2.10" in text
    assert "pip install 'lightning==2.10.*'" in text


def test_only_rank_0_says_so(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert warned(monkeypatch, "9.9") == []
    monkeypatch.setattr(versions, "_warned", set())
    monkeypatch.setenv("RANK", "0")
    assert len(warned(monkeypatch, "9.9")) == 1


def test_a_library_that_is_missing_is_named():
    said = pytest.raises(ConfigError, match=r"needs no-such-library, which is not installed")
    with said as raised, versions.tested_with("no-such-library", "2.5", "2.6"):
        raise AssertionError("nothing is imported without it")
    assert "pip install 'no-such-library==2.6.*'" in str(raised.value)


@pytest.mark.parametrize("statement", ["from json import no_such_name", "import json; json.no_such_name"])
def test_a_name_that_is_gone_is_named_with_the_range_that_was_tested(monkeypatch, statement):
    monkeypatch.setattr(metadata, "version", lambda name: "3.1.0")
    warned = pytest.warns(versions.UntestedVersionWarning)
    with warned, pytest.raises(ConfigError) as raised, versions.tested_with("lightning", "2.5", "2.6"):
        exec(statement)
    text = str(raised.value)
    assert "does not work with version 3.1.0" in text
    assert "lightning 2.5 to 2.6, with which it was tested" in text
    assert "no_such_name" in text
    assert "--replace-ddp" in text


def test_the_warning_points_at_who_imports_the_integration(monkeypatch, tmp_path):
    monkeypatch.setattr(metadata, "version", lambda name: "3.1.0")
    (tmp_path / "made_up_glue.py").write_text(
        "from paceline.integrations.versions import tested_with\n"
        "with tested_with('lightning', '2.5', '2.6'):\n    import json\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        __import__("made_up_glue")
    assert [each.filename for each in caught] == [__file__]
