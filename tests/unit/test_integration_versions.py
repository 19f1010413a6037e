"""A library of a version that Paceline's part for it was not tested with is named, once, and works on."""

from __future__ import annotations

import warnings
from importlib import metadata

import pytest

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
