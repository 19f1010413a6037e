"""Tensors of any size and layout are broadcast in bounded pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")


from paceline.torch.communicator.broadcast import PreparedBroadcast  # noqa: E402


@given(st.lists(st.integers(0, 70), max_size=8), st.integers(1, 100))
def test_broadcasts_reach_every_tensor_in_bounded_pieces(sizes: list[int], piece_bytes: int) -> None:
    dtypes = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
    source = [torch.arange(n).to(dtypes[n % 4]).reshape(-1, 1).expand(n, 2) for n in sizes]
    source = [t.contiguous() if n % 3 else t.t().contiguous().t() for n, t in zip(sizes, source)]
    target = [torch.zeros_like(t) for t in source]
    sent: list[torch.Tensor] = []
    PreparedBroadcast(source, 0, lambda piece, root: sent.append(piece.clone()), piece_bytes)(0)
    assert all(piece.numel() <= piece_bytes for piece in sent)
    PreparedBroadcast(target, 1, lambda piece, root: piece.copy_(sent.pop(0)), piece_bytes)(0)
    assert all(torch.equal(a, b) for a, b in zip(source, target)) and not sent


def test_a_tensor_with_gaps_is_broadcast_without_touching_them() -> None:
    whole = torch.zeros(4, 3)
    PreparedBroadcast([whole[::2]], 1, lambda piece, root: piece.copy_(torch.ones(6).view(torch.uint8)))(0)
    assert whole.sum(1).tolist() == [3.0, 0.0, 3.0, 0.0]
