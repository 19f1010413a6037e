"""What is wrong on one rank alone is told on every rank, with Paddle."""

from __future__ import annotations

import pytest

from paceline import Group
from paceline.errors import ConfigError
from tests.harness import ranks


@ranks(2, framework="paddle")
def test_arguments_over_a_group(group: Group) -> None:
    import paddle
    from paddle import nn

    from paceline.paddle import DataParallel

    for wrong, said in (
        ({"bucket_cap_mb": "big"}, "bucket_cap_mb='big'"),
        ({"buffers": "average"}, "buffers='average'"),
        ({"layers": None}, "layers=None"),
    ):
        given = {"layers": nn.Linear(2, 2), "group": group, "timeout_s": 300.0}
        with pytest.raises(ConfigError) as caught:
            DataParallel(**given | (wrong if group.rank == 1 else {}))
        assert said in str(caught.value)
        if group.rank == 0:
            assert "Rank 1 of 2 could not wrap" in str(caught.value)
    model = DataParallel(nn.Linear(2, 2), group=group)
    model(paddle.ones([1, 2])).sum().backward()
