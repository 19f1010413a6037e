"""The places of gradients in the gradient buffer, and the parameters that have one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from paceline.reducer.plan import plan_buckets  # noqa: E402
from paceline.torch.model.inner_tensors import is_dense  # noqa: E402
from paceline.torch.model.parameters import ManagedTensors  # noqa: E402
from paceline.torch.ops import OPS  # noqa: E402


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(()), True),
        (torch.zeros(1, 3, 1)[:, ::1], True),
        (torch.zeros(4, 3)[::2], False),
        (torch.zeros(3).expand(2, 3), False),
    ],
)
def test_is_dense(tensor: torch.Tensor, expected: bool) -> None:
    assert is_dense(tensor) == expected


def test_views_lie_where_the_plan_says_and_as_the_parameter_does() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 5).double(), nn.Linear(2, 2)).to(
        memory_format=torch.channels_last
    )
    tensors = ManagedTensors(model)
    plan = plan_buckets(tensors.specs(), bucket_cap_bytes=100, first_bucket_bytes=64)
    gradient_buffer = OPS.allocate(plan, tensors.trainable)
    for index, (parameter, view) in enumerate(zip(tensors.trainable, gradient_buffer.places)):
        assert (view.shape, view.stride(), view.dtype) == (
            parameter.shape,
            parameter.stride(),
            parameter.dtype,
        )
        view.fill_(index + 1)
    for number, bucket in enumerate(plan.buckets):
        seen = set(gradient_buffer.bucket(number).tolist()) - {0.0}
        assert seen == {index + 1.0 for index in bucket.parameters}


def test_ignored_parameters_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    model._ddp_params_and_buffers_to_ignore = ["bias"]
    assert ManagedTensors(model).names == ["weight"]
