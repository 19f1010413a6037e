"""Hyperparameters that a step compares with those of the last one: every change is seen."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.torch.sharding.param_groups import looked_at  # noqa: E402


def make(**options: Any) -> list[dict[str, Any]]:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    options = {"lr": 0.1, **options}
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.1}]
    made = torch.optim.AdamW(groups, **options).param_groups
    made[1]["listed"] = [0.5]
    return made


def test_what_stays_is_equal() -> None:
    for options in ({}, {"lr": torch.tensor(0.1)}):
        groups = make(**options)
        assert looked_at(groups) == looked_at(groups)
        groups[0]["params"].append(torch.nn.Parameter(torch.zeros(3)))
        groups[1]["param_names"] = ["other"]
        assert looked_at(groups) == looked_at(make(**options)), "parameters are no hyperparameters"


def test_each_change_is_seen() -> None:
    def add(groups: list[dict[str, Any]]) -> None:
        groups[1]["another"] = 1

    changes = [
        ({}, lambda groups: groups[1].update(lr=0.2)),
        ({}, lambda groups: groups[0].update(betas=(0.9, 0.98))),
        ({}, lambda groups: groups[0].update(maximize=True)),
        ({}, lambda groups: groups[1].pop("eps")),
        ({}, add),
        # In place, which leaves the object the same.
        ({"lr": torch.tensor(0.1)}, lambda groups: groups[0]["lr"].fill_(0.3)),
        ({}, lambda groups: groups[1]["listed"].append(0.8)),
    ]
    for options, change in changes:
        groups = make(**options)
        before = looked_at(groups)
        change(groups)
        assert looked_at(groups) != before, (options, change)
