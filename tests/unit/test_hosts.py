"""The data between hosts: routes, headers, sums of weights, failures in words."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import _core
from paceline.collectives.failures import Reason, make_error, number_ranks
from paceline.errors import DeadlineError, MismatchError, PeerLostError
from paceline.health.peer_errors import pack_failure, unpack_failure
from paceline.reducer.between_hosts.host_sum_order import exact_blocks, has_bits_of_one_host, whole_hosts
from paceline.reducer.between_hosts.message_headers import HEADER_BYTES, PLANS, Envelope, Header, tag_of
from paceline.reducer.between_hosts.routes import ONE_ROUND_BYTES, num_shards, plan_route, spoken_for
from paceline.reducer.sum_order import add_in_order


@given(
    st.integers(1, 200_000),
    st.sampled_from([4, 8]),
    st.integers(1, 5),
    st.integers(2, 5),
    st.integers(256, 1 << 16),
    st.lists(st.integers(1, 4), min_size=5, max_size=5),
)
def test_routes_cover_a_bucket_once(
    count: int, itemsize: int, num_ranks: int, num_hosts: int, piece_bytes: int, blocks: list[int]
) -> None:
    num_blocks = blocks[:num_hosts]
    routes = [
        plan_route(count, itemsize, place, num_ranks, num_hosts, piece_bytes, num_blocks)
        for place in range(num_ranks)
    ]
    if set(num_blocks) == {1}:
        assert routes[0] == plan_route(count, itemsize, 0, num_ranks, num_hosts, piece_bytes)
    assert [route.shard.start for route in routes] == [0, *(route.shard.stop for route in routes[:-1])]
    assert routes[-1].shard.stop == count
    for route in routes:
        pieces = [piece for part in route.parts for piece in part]
        assert [i for piece in pieces for i in piece] == list(route.shard)
        assert all(len(piece) * itemsize <= max(piece_bytes, 16 * itemsize) for piece in pieces)
        assert all(part for part in route.parts)  # a message has more than its payload
        # The data that the host with the most blocks sends, to all others: everything, or blocks and its own
        # sums.
        nbytes, most = len(route.shard) * itemsize * (num_hosts - 1), max(num_blocks)
        is_small = nbytes * most * num_hosts - nbytes * (most + 1) <= ONE_ROUND_BYTES * num_hosts
        assert route.is_one_round == is_small
        assert len(route.parts) == (1 if route.is_one_round else num_hosts)
        for before, after in pairwise(pieces):
            assert before.stop == after.start
    sizes = [len(route.shard) for route in routes]
    assert max(sizes) - min(sizes) <= 2 * 16


@pytest.mark.parametrize(
    "one, other, most", [(1, 2, 1.0), (3, 1, 1.0), (2, 2, 1.5), (2, 3, 5 / 3), (5, 2, 1.8)]
)
def test_two_hosts_of_several_blocks_send_the_same(one: int, other: int, most: float) -> None:
    count = 1 << 20
    first, second = (
        sum(map(len, part)) / count for part in plan_route(count, 4, 0, 1, 2, num_blocks=(one, other)).parts
    )
    sent = [one * second + first, other * first + second]  # each block to the owner, then the sum
    assert max(sent) == pytest.approx(most, rel=1e-3)
    small = plan_route(100_000, 4, 0, 1, 2, num_blocks=(one, other))  # one chunk waits for the other
    assert abs(len(small.parts[0][0]) - len(small.parts[1][0])) <= 16


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, 1e-3]), min_size=1, max_size=9))
def test_weights_are_added_in_the_order_of_sums(weights: list[float]) -> None:
    def tree(first: int, end: int) -> float:
        """As ((0+1)+(2+3))+...: aligned powers of two."""
        size = 1
        while size * 2 < end - first:
            size *= 2
        if end - first == 1:
            return weights[first]
        return tree(first, first + size) + tree(first + size, end)

    assert add_in_order(weights) == tree(0, len(weights))


def test_a_header_shows_what_a_message_is() -> None:
    message = np.zeros(HEADER_BYTES + 8, np.uint8)
    fields = {"generation": 2, "bucket": 7, "phase": 1, "host": 3, "piece": 4}
    envelope, number = Envelope(message, **fields), 1 << 40
    assert Header.read(message) is None and not envelope.has_begun_to_come(0)
    envelope.write(number, 2.5)
    assert Header.read(message) == envelope.header(number, 2.5)
    assert Header.read(message) == Header(2, number, bucket=7, round=1, host=3, piece=4, weight=2.5, nbytes=8)
    assert envelope.weight_in(number) == 2.5 and envelope.has_begun_to_come(number)
    assert envelope.weight_in(number - 1) is None and not envelope.has_begun_to_come(number - 1)
    for name in fields:
        came = message.copy()
        other = Envelope(came, **{**fields, name: fields[name] + 1})
        came[:] = message
        assert other.weight_in(number) is None, name
    longer = np.zeros(HEADER_BYTES + 9, np.uint8)
    other = Envelope(longer, **fields)
    longer[: len(message)] = message
    assert other.weight_in(number) is None
    message[0] += 1
    assert envelope.weight_in(number) is None and not envelope.has_begun_to_come(number)
    assert "iteration 1099511627776, bucket 7, round 1, piece 4 of host 3" in str(envelope.header(number))


def test_tags_are_all_different() -> None:
    tags = [
        tag_of(bucket, phase, piece, plan)
        for bucket in (0, 1, 2, 32767)
        for phase in (0, 1)
        for piece in (*range(9), 4095)
        for plan in (PLANS, PLANS + 1, PLANS + 2)
    ]
    assert len(set(tags)) == len(tags)
    assert min(tags) >= 0 and max(tags) < 1 << 31


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5))
def test_every_rank_is_spoken_for_once(sizes: list[int]) -> None:
    first = [sum(sizes[:host]) for host in range(len(sizes))]
    hosts = [range(begin, begin + size) for begin, size in zip(first, sizes)]
    shards = num_shards(hosts)
    assert shards == min(sizes)
    for host in hosts:
        dealt = [spoken_for(host, local_rank, shards) for local_rank in range(shards)]
        assert sorted(rank for ranks in dealt for rank in ranks) == list(host)
        assert [ranks[0] for ranks in dealt] == list(host[:shards])


@pytest.mark.parametrize(
    "hosts",
    [
        [[0, 1], [2, 3]],
        [[0], [1], [2]],
        [[0, 1], [2]],
        [[0, 1, 2, 3], [4, 5, 6]],
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]],
    ],
)
def test_aligned_blocks_have_the_bits_of_one_host(hosts: list[list[int]]) -> None:
    assert has_bits_of_one_host(hosts)
    assert sums_of(hosts) == sums_of([sorted(rank for host in hosts for rank in host)])


@pytest.mark.parametrize(
    "hosts", [[[0, 2], [1, 3]], [[0], [1, 2]], [[0, 1, 2], [3, 4, 5]], [[0, 1, 2, 3], [4, 5], [6, 7]]]
)
def test_other_layouts_have_bits_of_their_own(hosts: list[list[int]]) -> None:
    assert not has_bits_of_one_host(hosts)
    assert sums_of(hosts) != sums_of([sorted(rank for host in hosts for rank in host)])


@given(
    st.integers(2, 4),
    st.lists(st.integers(0, 3), min_size=2, max_size=12),
    st.sampled_from([2, 128]),
)
def test_exact_blocks_give_the_sums_of_one_host_in_every_layout(
    num_hosts: int, placed: list[int], most: int
) -> None:
    hosts = by_host([host % num_hosts for host in placed])
    found = exact_blocks(hosts, most)
    dealt = [hosts[block.host][slice(*block.local_ranks)] for block in found.blocks]
    assert [rank for ranks in dealt for rank in ranks] == list(range(len(placed)))
    assert found.steps or len(dealt) <= most
    rng = np.random.default_rng(0)
    for _ in range(100):
        row = list(map(float, rng.standard_normal(len(placed))))
        assert found.add([add_in_order([row[rank] for rank in ranks]) for ranks in dealt]) == add_in_order(
            row
        )
    if has_bits_of_one_host(hosts) and len(hosts) <= most:
        assert found == whole_hosts(hosts, _core.MAX_RANKS)


def test_sizes_of_exact_blocks() -> None:
    def sizes(*placed: int) -> list[int]:
        found = exact_blocks(by_host(list(placed)), 128)
        return [block.local_ranks[1] - block.local_ranks[0] for block in found.blocks]

    assert sizes(0, 0, 1, 1) == [2, 2]
    assert sizes(0, 0, 0, 0, 1, 1) == [4, 2]
    assert sizes(0, 1, 0, 1) == [1, 1, 1, 1]
    assert sizes(0, 0, 0, 1, 1, 1) == [2, 1, 1, 2]
    assert sizes(0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1) == [4, 2, 2, 4]
    assert sizes(1, 1, 0, 0, 1) == [2, 2, 1]


def by_host(placed: list[int]) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their lowest ranks, if rank r is on host placed[r]."""
    hosts = list(dict.fromkeys(placed))
    return [[rank for rank, host in enumerate(placed) if host == each] for each in hosts]


def sums_of(hosts: list[list[int]]) -> list[float]:
    """Sums of numbers whose order of addition shows: in each host, then over the hosts."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((sum(map(len, hosts)), 200))
    columns = [[add_in_order([float(rows[r][k]) for r in host]) for host in hosts] for k in range(200)]
    return list(map(add_in_order, columns))


@pytest.mark.parametrize(
    "error",
    [
        PeerLostError("Rank 3 of 4 died.", where="bucket 1", seen="closed", lost=(3,)),
        DeadlineError("Rank 0 of 4 gave up.", likely="late", late=(2,)),
        MismatchError("Another message."),
    ],
)
def test_failures_reach_others_as_they_are(error: PeerLostError | DeadlineError | MismatchError) -> None:
    unpacked = unpack_failure(
        PeerLostError("Rank 0 of 2 raised.", seen=pack_failure(error, 2), lost=(0,)), "told by rank 2"
    )
    assert type(unpacked) is type(error)
    assert (unpacked.summary, unpacked.where, unpacked.likely, unpacked.fields) == (
        error.summary,
        error.where,
        error.likely,
        error.fields,
    )
    assert "told by rank 2" in unpacked.seen
    own = PeerLostError("Rank 0 of 2 raised.", seen="ValueError: mine")
    assert unpack_failure(own) is own


@pytest.mark.parametrize(
    "error", [ValueError("\u00e9" * 5000), PeerLostError("x" * 3000, seen="y" * 3000, lost=tuple(range(128)))]
)
def test_a_long_text_reaches_others_cut(error: Exception) -> None:
    packed = pack_failure(error, 3)
    assert len(packed.encode()) < 1024  # the reports that one rank of a host can pass to the others
    unpacked = unpack_failure(PeerLostError("Rank 0 of 2 raised.", seen=packed, lost=(0,)))
    assert isinstance(unpacked, PeerLostError)
    if isinstance(error, ValueError):
        assert unpacked.lost == (3,) and "ValueError: \u00e9" in unpacked.seen
    else:
        assert unpacked.lost == tuple(range(32)) and unpacked.summary.startswith("xxx")


def test_an_exception_of_a_rank_names_it() -> None:
    packed = pack_failure(KeyboardInterrupt(), 3)
    unpacked = unpack_failure(PeerLostError("Rank 0 of 2 raised.", seen=packed, lost=(0,)), "told by rank 3")
    assert (
        isinstance(unpacked, PeerLostError)
        and unpacked.lost == (3,)
        and unpacked.summary.startswith("Rank 3 ")
    )
    assert "KeyboardInterrupt" in unpacked.seen and "told by rank 3" in unpacked.seen


def test_ranks_of_a_hosts_group_have_the_numbers_of_all() -> None:
    def line(rank: int) -> dict[str, object]:
        call = {"kind": 0, "count": 0, "number": 0, "dtype": 0, "op": 0, "root": 0}
        state = {"pid": 70 + rank, "state": "alive", "crash_signal": 0, "activity": f"in place {rank}"}
        wait = {"waits_in": "", "waits_at": 0, "waits_for": [], "forwards": 0}
        return {"rank": rank, "call": call, "same_call": call, **state, **wait}

    facts = {
        "reason": int(Reason.DEADLINE),
        "group": "a host of test_hosts",
        "rank": 0,
        "world_size": 2,
        "culprit": 1,
        "late": [1],
        "waiting": [],
        "waited_s": 1.0,
        "message": "",
        "call": line(0)["call"],
        "ranks": [line(0), line(1)],
    }
    assert make_error(facts).summary.startswith("Rank 1 of 2 ")
    number_ranks("a host of test_hosts", [4, 6], 8)
    error = make_error(facts)
    assert isinstance(error, DeadlineError)
    assert error.summary.startswith("Rank 6 of 8 ") and error.late == (6,) and error.fields["rank"] == 4
    assert "rank 6 (pid 71) is alive; in place 1" in error.seen
    died = make_error({**facts, "reason": int(Reason.DIED)})
    assert died.fields["lost"] == (6,) and "71" in died.seen
