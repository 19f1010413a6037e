"""Every collective of the torch backend, against Gloo on the same inputs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from paceline.errors import MismatchError
from tests.harness import ranks
from tests.multiprocess.torch_groups import (
    all_gather_single,
    needs_backend,
    reduce_scatter_single,
    torch_group,
)

pytestmark = needs_backend

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES += [torch.int8, torch.int32, torch.int64, torch.uint8]
OPS = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]


def numbers(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Small integers: every dtype holds their sums and products over the ranks exactly."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 3, shape, generator=generator).to(dtype)


def premultiplied(factor):
    """Return the sum of what each rank has multiplied; torch before 2.10 has a function for it."""
    make = ReduceOp.PREMUL_SUM
    return make(factor) if callable(make) else dist._make_nccl_premul_sum(factor)


def all_reduce(group, rank, world, dtype):
    results = [numbers(rank, dtype, 5, 7) for _ in OPS]
    for tensor, op in zip(results, OPS, strict=True):
        dist.all_reduce(tensor, op, group=group)
    return results


def all_reduce_async(group, rank, world, dtype):
    tensor = numbers(rank, dtype, 1000)
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    return [tensor]


def reduce(group, rank, world, dtype):
    tensor = numbers(rank, dtype, 5, 7)
    dist.reduce(tensor, world - 1, group=group)
    return [tensor] if rank == world - 1 else []


def broadcast(group, rank, world, dtype):
    tensor = numbers(rank, dtype, 5, 7)
    dist.broadcast(tensor, world - 1, group=group)
    return [tensor]


def all_gather(group, rank, world, dtype):
    outputs = [torch.zeros(5, 7, dtype=dtype) for _ in range(world)]
    dist.all_gather(outputs, numbers(rank, dtype, 5, 7), group=group)
    return outputs


def all_gather_into_one(group, rank, world, dtype):
    output = torch.zeros(world * 5, 7, dtype=dtype)
    all_gather_single(output, numbers(rank, dtype, 5, 7), group=group)
    return [output]


def reduce_scatter(group, rank, world, dtype):
    output = torch.zeros(5, 7, dtype=dtype)
    dist.reduce_scatter(output, list(numbers(rank, dtype, world, 5, 7)), group=group)
    return [output]


def reduce_scatter_from_one(group, rank, world, dtype):
    output = torch.zeros(5, 7, dtype=dtype)
    reduce_scatter_single(output, numbers(rank, dtype, world * 5, 7), group=group)
    return [output]


def gather(group, rank, world, dtype):
    outputs = [torch.zeros(5, 7, dtype=dtype) for _ in range(world)] if rank == 0 else None
    dist.gather(numbers(rank, dtype, 5, 7), outputs, 0, group=group)
    return outputs or []


def scatter(group, rank, world, dtype):
    output = torch.zeros(5, 7, dtype=dtype)
    inputs = list(numbers(rank, dtype, world, 5, 7)) if rank == 0 else None
    dist.scatter(output, inputs, 0, group=group)
    return [output]


def all_to_all_even(group, rank, world, dtype):
    output = torch.zeros(world * 3, 2, dtype=dtype)
    dist.all_to_all_single(output, numbers(rank, dtype, world * 3, 2), group=group)
    return [output]


def all_to_all_uneven(group, rank, world, dtype):
    # Each rank sends r + 1 rows to rank r.
    sent, received = [r + 1 for r in range(world)], [rank + 1] * world
    output = torch.zeros(sum(received), 2, dtype=dtype)
    dist.all_to_all_single(output, numbers(rank, dtype, sum(sent), 2), received, sent, group=group)
    return [output]


@pytest.mark.skipif(torch.__version__ < "2.8", reason="Gloo of torch before 2.8 has no reduce_scatter")
@pytest.mark.parametrize("world_size", [1, 2, 3])
@ranks("world_size", group=None)
def test_collectives_give_what_gloo_gives(rank, world_size):
    collectives = [all_reduce, all_reduce_async, reduce, broadcast, all_gather, all_gather_into_one]
    collectives += [reduce_scatter, reduce_scatter_from_one, gather, scatter, all_to_all_even]
    with torch_group(rank):
        gloo = dist.new_group(backend="gloo")
        for dtype in DTYPES:
            for collective in [*collectives, all_to_all_uneven]:
                ours = collective(None, rank, world_size, dtype)
                theirs = collective(gloo, rank, world_size, dtype)
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=f"{collective.__name__} {dtype}")


@ranks(2, group=None)
def test_options_without_async_op(rank):
    """torch 2.6 makes its options without asyncOp, and waits for the returned work itself."""
    with torch_group(rank) as group:
        for number in (1.0, 2.0):
            tensor = torch.full((3,), number)
            group.allreduce([tensor], SimpleNamespace(reduceOp=ReduceOp.SUM)).wait()
            assert tensor.tolist() == [2 * number] * 3
        tensor = torch.full((3,), float(rank))
        group.broadcast([tensor], SimpleNamespace(rootRank=1)).wait()
        assert tensor.tolist() == [1, 1, 1]


@ranks(2, group=None)
def test_reductions_that_gloo_lacks(rank):
    with torch_group(rank):
        tensor = torch.full((3,), 2.0 * rank)
        dist.all_reduce(tensor, ReduceOp.AVG)
        assert tensor.tolist() == [1, 1, 1]

        tensor = torch.full((3,), 2.0 * rank)
        dist.all_reduce(tensor, premultiplied(0.25))
        assert tensor.tolist() == [0.5, 0.5, 0.5]

        tensor, output = torch.full((4,), 2.0 * rank), torch.zeros(2)
        reduce_scatter_single(output, tensor, premultiplied(0.25))
        assert output.tolist() == [0.5, 0.5]
        assert tensor.tolist() == [2.0 * rank] * 4

        flags = torch.tensor([True, rank == 0, False])
        dist.all_reduce(both := flags.clone(), ReduceOp.BAND)
        dist.all_reduce(either := flags.clone(), ReduceOp.BOR)
        assert both.tolist() == [True, False, False]
        assert either.tolist() == [True, True, False]

        for make in (dist.all_reduce, lambda t: dist.reduce(t, 0)):
            make(tensor := torch.full((3,), complex(rank, 1)))
            if rank == 0:
                assert tensor.tolist() == [1 + 2j] * 3


@ranks(3, group=None)
def test_sizes_may_differ_between_ranks(rank):
    with torch_group(rank):
        outputs = [torch.zeros(r + 1) for r in range(3)]
        dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
        assert [t.tolist() for t in outputs] == [[0], [1, 1], [2, 2, 2]]

        output = torch.zeros(rank + 1)
        dist.reduce_scatter(output, [torch.full((r + 1,), float(rank)) for r in range(3)])
        assert output.tolist() == [3.0] * (rank + 1)

        outputs = [torch.zeros(rank + 1) for _ in range(3)]
        dist.all_to_all(outputs, [torch.full((r + 1,), float(rank)) for r in range(3)])
        assert [t.tolist() for t in outputs] == [[float(r)] * (rank + 1) for r in range(3)]


@ranks(2, group=None)
def test_all_dense_layouts_are_supported(rank):
    with torch_group(rank):
        rows = torch.arange(12.0).view(3, 4)
        dist.all_reduce(strided := rows.clone().t())
        torch.testing.assert_close(strided, 2 * rows.t())
        dist.all_reduce(every_other := (rows + rank).flatten()[::2])
        torch.testing.assert_close(every_other, (2 * rows + 1).flatten()[::2])
        dist.broadcast(strided := (rows + rank).t(), 1)
        torch.testing.assert_close(strided, (rows + 1).t())
        all_gather_single(gathered := torch.zeros(4, 6).t(), (rows + rank).t().contiguous().view(3, 4))
        assert gathered.is_contiguous() is False
        torch.testing.assert_close(gathered[:3], rows.t().reshape(3, 4))

        outputs = [torch.zeros(4, 3).t() for _ in range(2)]
        dist.all_gather(outputs, (rows + rank).conj())
        torch.testing.assert_close(outputs, [rows, rows + 1])

        weight = torch.nn.Parameter(rows.clone().t())
        dist.all_reduce(weight)
        torch.testing.assert_close(weight.detach(), 2 * rows.t())
        with torch.inference_mode():
            inferred = rows.clone().t()
        dist.all_reduce(inferred)
        dist.all_reduce(inferred, async_op=True).wait()
        torch.testing.assert_close(inferred.clone(), 4 * rows.t())

        dist.all_reduce(torch.empty(0))
        dist.broadcast(torch.empty(0), 0)
        conjugate = torch.full((2,), complex(0, rank + 1)).conj()
        dist.all_gather(
            outputs := [torch.zeros(2, dtype=torch.complex64) for _ in range(2)], conjugate.resolve_conj()
        )
        assert outputs[1].tolist() == [-2j, -2j]


@ranks(3, group=None)
def test_sparse_tensors_are_added_up(rank):
    """Entries of one rank, of several, or of none, and rows of vectors, against sums of the dense tensors."""

    def tensors_of(rank, dtype):
        generator = torch.Generator().manual_seed(rank)
        numbers = torch.randint(-9, 9, (20, 4, 3), generator=generator).to(dtype)
        numbers[torch.rand(20, 4, generator=generator) < 0.7] = 0
        at = torch.tensor([[1, 1, rank]])
        with torch.sparse.check_sparse_tensor_invariants():
            twice = torch.sparse_coo_tensor(at, numbers[:3, 0, 0], (5,))
            empty = torch.sparse_coo_tensor(size=(5,), dtype=dtype)
        return [numbers.to_sparse(), numbers.to_sparse(1), twice, (empty if rank else twice).clone(), empty]

    with torch_group(rank):
        for dtype in (torch.float32, torch.float64, torch.int64):
            every = [tensors_of(each, dtype) for each in range(3)]
            for own, *summands in zip(tensors_of(rank, dtype), *every):
                dist.all_reduce(own)
                assert own.is_sparse and own.is_coalesced()
                assert torch.equal(own.to_dense(), sum(each.to_dense() for each in summands))
        work = dist.all_reduce(own := torch.eye(3).to_sparse(), async_op=True)
        work.wait()
        assert torch.equal(own.to_dense(), 3 * torch.eye(3))


@ranks(2, group=None)
def test_sparse_tensors_that_differ_are_reported_on_every_rank(rank):
    with torch_group(rank):
        with pytest.raises(MismatchError, match=r"shape \(2, 2\)[^$]*shape \(3, 3\)"):
            dist.all_reduce(torch.eye(2 + rank).to_sparse())
        dist.barrier()


@ranks(2, group=None)
def test_objects(rank):
    with torch_group(rank):
        dist.all_gather_object(gathered := [None, None], {"rank": rank})
        assert gathered == [{"rank": 0}, {"rank": 1}]
        dist.broadcast_object_list(received := [rank, "x" * rank], 1)
        assert received == [1, "x"]
        dist.gather_object(rank * "y", collected := [None, None] if rank == 0 else None)
        assert collected in (["", "y"], None)
        dist.scatter_object_list(mine := [None], ["a", "b"] if rank == 0 else None, 0)
        assert mine == ["ab"[rank]]


@ranks(2, group=None)
def test_unsupported_calls_raise_on_every_rank(rank):
    with torch_group(rank):
        for call, words in [
            (lambda: dist.all_reduce(torch.ones(2, dtype=torch.uint16)), "no SUM of torch.uint16"),
            (
                lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.AVG),
                "no AVG of torch.int32",
            ),
            (
                lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.BXOR),
                "no BXOR of torch.int32",
            ),
            (lambda: dist.all_reduce(torch.ones(2).to_sparse(), ReduceOp.MAX), "only added up"),
            (lambda: dist.broadcast(torch.ones(2).to_sparse(), 0), "does not take torch.sparse_coo"),
            (lambda: dist.all_reduce(torch.ones(2, device="meta")), "no backend for meta tensors"),
            (lambda: all_gather_single(torch.ones(3), torch.ones(2)), "wrong size"),
            (lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [2, 2]), "splits"),
        ]:
            with pytest.raises(ValueError, match=words):
                call()
        dist.barrier()
