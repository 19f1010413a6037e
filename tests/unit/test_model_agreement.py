"""The agreement check names the first difference, on every rank, and is silent if there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import ModelMismatchError
from paceline.reducer.model_agreement import (
    ModelDescription,
    TensorDescription,
    check_agreement,
    first_difference,
)

WEIGHT = TensorDescription("fc.weight", (10, 4), "float32", "cpu", requires_grad=True)
BIAS = TensorDescription("fc.bias", (10,), "float32", "cpu", requires_grad=True)
MEAN = TensorDescription("bn.running_mean", (3,), "float32", "cpu")
MODEL = ModelDescription((WEIGHT, BIAS), (MEAN,), {"bucket_cap_mb": "25"})


class Rehearsed:
    """An exchange whose other ranks give the scripted answers, round after round."""

    def __init__(self, models: list[ModelDescription]) -> None:
        self.rank, self.world_size = 0, len(models)
        self._models = models
        self.rounds = 0

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        import hashlib

        self.rounds += 1
        payloads = [model.to_json() for model in self._models]
        if self.rounds == 1:
            payloads = [hashlib.sha256(text).digest() for text in payloads]
        assert payloads[0] == payload
        return payloads


def difference(*models: ModelDescription) -> ModelMismatchError:
    with pytest.raises(ModelMismatchError) as caught:
        check_agreement(models[0], Rehearsed(list(models)), timeout_s=1.0)
    assert str(caught.value) == str(first_difference(models))
    return caught.value


def with_weight(**changes: object) -> ModelDescription:
    return replace(MODEL, parameters=(replace(WEIGHT, **changes), BIAS))  # type: ignore[arg-type]


def test_same_models_cost_one_round() -> None:
    exchange = Rehearsed([MODEL] * 3)
    check_agreement(MODEL, exchange, timeout_s=1.0)
    assert exchange.rounds == 1


def test_a_description_survives_json() -> None:
    assert ModelDescription.from_json(MODEL.to_json()) == MODEL


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": (10, 5)}, ["shape differs", "(10, 4)", "(10, 5)"]),
        ({"dtype": "float64"}, ["dtype differs", "float32", "float64"]),
        ({"device": "cuda"}, ["device differs", "cpu", "cuda"]),
        ({"requires_grad": False}, ["trainable differs", "trainable=True", "trainable=False"]),
        ({"strides": (1, 10)}, ["memory format differs", "strides (1, 10)"]),
        ({"name": "fc.kernel"}, ["some ranks lack it", "fc.weight", "fc.kernel"]),
    ],
)
def test_each_field_is_named_with_both_sides(changes: dict[str, object], words: list[str]) -> None:
    error = difference(MODEL, with_weight(**changes), MODEL)
    assert error.parameter == "fc.weight"
    for word in [*words, "ranks 0, 2: ", "rank 1: ", "'fc.weight'"]:
        assert word in str(error)


def test_swapped_parameters_are_an_order() -> None:
    swapped = replace(MODEL, parameters=(BIAS, WEIGHT))
    assert "the order differs" in str(difference(MODEL, swapped))


def test_a_missing_parameter_is_named() -> None:
    short = replace(MODEL, parameters=(WEIGHT,))
    error = difference(short, MODEL)
    assert error.parameter == "fc.bias"
    assert "the model ends before it" in str(error)
    assert error.where == "parameter 2, in registration order; the ranks have 1 or 2 parameters"


def test_buffers_and_options_count_too() -> None:
    assert "buffer 'bn.running_mean'" in str(difference(MODEL, replace(MODEL, buffers=())))
    error = difference(MODEL, replace(MODEL, options={"bucket_cap_mb": "1"}))
    assert "bucket_cap_mb=25" in str(error) and "bucket_cap_mb=1" in str(error)
