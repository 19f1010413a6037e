"""StoreExchange with ranks as threads: torch's stores work with threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RendezvousError
from paceline.torch.communicator.store_exchange import StoreExchange, store_of


def on_ranks(program, world_size):
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(program, range(world_size)))


@given(st.lists(st.lists(st.binary(max_size=40), min_size=3, max_size=3), min_size=1, max_size=4))
def test_every_rank_gets_all_ranks_bytes(rounds):
    store = dist.HashStore()

    def program(rank):
        exchange = StoreExchange(store, rank, 3, "a")
        return [exchange.all_gather(payloads[rank], 30) for payloads in rounds]

    assert on_ranks(program, 3) == [rounds] * 3


def test_groups_with_one_name_and_store_do_not_mix():
    store = dist.HashStore()

    def program(rank):
        got = []
        for generation in range(3):
            exchange = StoreExchange(store, rank, 2, "a")
            got += [exchange.all_gather(bytes([rank, generation, i]), 30) for i in range(2)]
        return got

    expected = [
        [bytes([rank, generation, i]) for rank in range(2)] for generation in range(3) for i in range(2)
    ]
    assert on_ranks(program, 2) == [expected] * 2


def test_a_rank_that_died_early_does_not_spoil_the_next_attempt(monkeypatch):
    """torchrun's agent keeps its store; rank 1 died in attempt 0 before it had made an exchange."""
    store = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    StoreExchange(store, 0, 2, "a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    def program(rank):
        return StoreExchange(store, rank, 2, "a").all_gather(bytes([rank]), 30)

    assert on_ranks(program, 2) == [[b"\0", b"\1"]] * 2


def test_old_keys_are_deleted():
    store = dist.HashStore()

    def program(rank):
        exchange = StoreExchange(store, rank, 2, "a")
        for _ in range(20):
            exchange.all_gather(b"x", 30)

    on_ranks(program, 2)
    assert store.num_keys() == 4  # a count and the last payload of each rank


def test_missing_ranks_are_named():
    exchange = StoreExchange(dist.HashStore(), 1, 4, "a")
    with pytest.raises(RendezvousError, match=r"gave up waiting for ranks 0, 2-3 after 0\.1 s") as caught:
        exchange.all_gather(b"x", 0.1)
    assert caught.value.missing == (0, 2, 3)


def test_ranks_that_disagree_on_the_world_size_raise_at_once():
    store = dist.HashStore()

    def program(rank):
        with pytest.raises(RendezvousError, match="disagree about the world size"):
            StoreExchange(store, rank, 2 + rank, "a").all_gather(b"x", 30)

    on_ranks(program, 2)


def test_words_of_an_unknown_peer_are_no_payload(monkeypatch):
    """An attacker who reaches the store writes the payload of rank 1, except for the secret."""
    monkeypatch.setenv("PACELINE_SECRET", "0123456789abcdef")
    store = dist.HashStore()
    exchange = StoreExchange(store, 0, 2, "a", "a group")
    store.set(f"{exchange._prefix}/1/1", f"{'0' * 32} ".encode() + (2).to_bytes(4, "little") + b"x")
    with pytest.raises(RendezvousError, match="holds for rank 1 of 2 is not of a rank of this job") as caught:
        exchange.all_gather(b"x", 30)
    assert "another secret" in caught.value.seen and caught.value.peer == 1


def test_ranks_with_one_secret_exchange_and_those_with_two_do_not(monkeypatch):
    store = dist.HashStore()

    def exchanges(names):
        for rank, secret in enumerate(names):
            monkeypatch.setenv("PACELINE_SECRET", secret)
            yield StoreExchange(store, rank, 2, "a", "a group")

    same, other = list(exchanges(["0123456789abcdef"] * 2)), list(exchanges(["0123456789abcdef", "x" * 16]))
    assert on_ranks(lambda rank: same[rank].all_gather(bytes([rank]), 30), 2) == [[b"\0", b"\1"]] * 2

    def refused(rank):
        with pytest.raises(RendezvousError, match=f"for rank {1 - rank} of 2 is not of a rank of this job"):
            other[rank].all_gather(b"x", 30)

    on_ranks(refused, 2)


def test_the_store_of_a_group_is_found_without_its_own_method(monkeypatch):
    """Groups of torch 2.6 do not expose their store; a private function of torch does."""
    stores = {"a group": object()}
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", stores.__getitem__)
    assert store_of("a group") is stores["a group"]
    assert store_of("another one") is None
