"""All ranks get the same bits, in both front ends, whatever floating-point mode one of them has set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.multiprocess.other_floats import KINDS, ROUNDINGS, delicate, other_floats
from tests.multiprocess.test_conformance import adapter, on_two_ranks, same_on_all_ranks

COLUMNS = 40


def kinds(framework: str) -> list[str]:
    """Only torch can flush subnormals."""
    return KINDS if framework.startswith("torch") else ROUNDINGS


@pytest.mark.parametrize("framework", ["torch.distributed", "paddle.distributed"])
@on_two_ranks
def test_a_corrected_mean_of_another_process_group(group: Any, framework: str) -> None:
    do = adapter(framework)
    for dtype in do.MEANS:
        model = do.Factors(dtype)  # its gradient equals its argument, bit for bit
        # In a sequence, because the model's `weight` would hide that of Paddle's wrapper.
        wrapped = do.wrap(do.sequence(model), group)
        first, second = (do.rounded(delicate(rank, COLUMNS), dtype) for rank in range(2))
        expected = np.tile((first + 2 * second) / 3, (3, 1))
        for floats in kinds(framework):
            do.clear(model)
            loss = wrapped(delicate(group.rank, COLUMNS))
            with other_floats(floats if group.rank == 1 else None):
                # The weights 1 and 2 come after a forward that assumed equal ones: all ranks correct the sum.
                wrapped.weight(group.rank + 1)
                do.backward(loss)
            same_on_all_ranks([do.bits(model.weight.grad)], group)
            got, resolution = do.as_float64(model.weight.grad), do.resolution(dtype)
            # The other columns are subnormal, also in bfloat16, which has the range of float32.
            assert_allclose(
                got[:, 1::2], expected[:, 1::2], 4 * resolution, 4e-4 * resolution, err_msg=floats
            )


@pytest.mark.parametrize("framework", ["torch", "paddle"])
@on_two_ranks
def test_a_mean_of_sparse_rows(group: Any, framework: str) -> None:
    do = adapter(framework)
    for dtype in do.SPARSE:
        table = do.table(3, COLUMNS, dtype)
        wrapped = do.wrap(do.sequence(table), group)
        for floats in kinds(framework):
            do.clear(table)
            with other_floats(floats if group.rank == 1 else None):
                wrapped.weight(1 + 0.1 * group.rank)  # the sum of the weights is rounded, too
                rows = wrapped(do.tensor(np.array([1])))
                do.backward((rows * do.tensor(delicate(group.rank, COLUMNS))).sum())
            same_on_all_ranks([do.bits(do.rows(table.weight.grad))], group)
