"""A framework that is missing, too old or newer than tested is named when Paceline's part is imported."""

from __future__ import annotations

import warnings

import pytest

from paceline import versions
from paceline.errors import ConfigError


def check(monkeypatch, installed: str, *, refuses_newer: bool = False) -> list[str]:
    monkeypatch.setattr(versions, "installed", lambda _: installed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.check_version(
            "paceline.torch",
            "PyTorch",
            ["torch"],
            (2, 11),
            ((2, 12), (2, 13)),
            extra="torch",
            refuses_newer=refuses_newer,
        )
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("installed", ["2.12.0", "2.13.0+cpu", "2.12.0rc1"])
def test_a_tested_version_is_no_news(monkeypatch, installed):
    assert check(monkeypatch, installed) == []


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ("2.6.0+cu124", "does not support PyTorch 2.6.0"),
        ("1.13.1", "does not support"),
        ("", "not installed"),
    ],
)
def test_a_version_that_is_too_old_is_refused_as_an_import_that_fails(monkeypatch, installed, said):
    with pytest.raises(ImportError, match=said) as caught:
        check(monkeypatch, installed)
    assert isinstance(caught.value, ConfigError)
    assert "PyTorch 2.11 or newer" in str(caught.value)
    assert f"{versions.install('torch')} chooses one that fits" in str(caught.value)


def test_an_untested_version_is_reported_once_for_all_ranks(monkeypatch):
    (text,) = check(monkeypatch, "2.11.0")
    assert "tested with PyTorch 2.12 and 2.13, and not with 2.11.0" in text
    (text,) = check(monkeypatch, "2.15.0+cu132")
    assert "and not with 2.15.0" in text
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert check(monkeypatch, "2.15.0+cu132") == []


def test_a_newer_version_may_be_refused(monkeypatch):
    with pytest.raises(ImportError, match=r"does not support PyTorch 3\.0"):
        check(monkeypatch, "3.0.1", refuses_newer=True)
