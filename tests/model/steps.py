"""The steps of one rank: each is one operation of `cpp/reducer`, and names it.

`STEPS` maps the position of a rank to its next step. `CODE` maps it to the text of the C++ source that the
step represents; a test looks that up. A step yields every state that may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .state import (
    GRADIENT,
    HALF,
    MEAN,
    OVER,
    REFUSED,
    UNUSED,
    Backward,
    Cells,
    Rank,
    Setting,
    Shared,
    State,
    replaced,
)


class Violation(Exception):
    """A state that must not be reached."""


Steps = Iterator[State]
STEPS: dict[str, Callable[[Setting, State, int], Steps]] = {}
CODE: dict[str, tuple[str, ...]] = {}


def step(at: str, *code: str):
    """Register the step of a rank at position `at`, with its text in the C++ source."""

    def register(function: Callable[[Setting, State, int], Steps]):
        STEPS[at], CODE[at] = function, code
        return function

    return register


def moved(
    state: State, r: int, rank: Rank, shared: Shared | None = None, cells: Cells | None = None
) -> State:
    return state._replace(
        shared=state.shared if shared is None else shared,
        ranks=replaced(state.ranks, r, rank),
        cells=state.cells if cells is None else cells,
    )


def woken(state: State, count: int) -> Steps:
    """Yield every way to wake `count` sleepers of the bell."""
    asleep = [r for r, rank in enumerate(state.ranks) if rank.asleep]
    if not asleep:
        yield state
    elif count >= len(asleep):
        yield state._replace(ranks=tuple(rank._replace(asleep=False) for rank in state.ranks))
    else:
        for r in asleep:
            yield state._replace(ranks=replaced(state.ranks, r, state.ranks[r]._replace(asleep=False)))


def ring(state: State, count: int) -> Steps:
    """Reducer::ring: the change of the bell, the look at the sleepers and the wake-up, as one step.

    One step is enough: a rank that announces itself in between compares the bell before it sleeps.
    """
    rung = state._replace(shared=state.shared._replace(bell=state.shared.bell + 1))
    yield from woken(rung, count) if state.shared.sleepers else [rung]


def all_ranks(setting: Setting) -> int:
    return 1 if setting.mistake == "one is woken" else setting.ranks


def index_of(setting: Setting, chunk: tuple[int, int]) -> int:
    return sum(setting.chunks[: chunk[0]]) + chunk[1]


def backward_of(setting: Setting, rank: Rank) -> Backward:
    return setting.backwards[rank.number - 1]


def left_out_by(setting: Setting, r: int, rank: Rank) -> int:
    return backward_of(setting, rank).left_out_by(r, len(setting.chunks))


def first_of(buckets: int) -> int:
    return (buckets & -buckets).bit_length() - 1


# --- a backward ---


@step("begin", "Reducer::begin_backward", "Reducer::check_usable")
def begin(setting: Setting, state: State, r: int) -> Steps:
    rank = state.ranks[r]
    if state.shared.abort:
        yield moved(state, r, rank._replace(at="raised"))
        return
    fresh = rank._replace(posted=0, done=(0,) * len(setting.chunks), exhausted=0)
    yield moved(state, r, fresh._replace(at="mark"))


@step("mark", "Reducer::mark_ready", "kMarkReady", "kBeforePost")
def mark(setting: Setting, state: State, r: int) -> Steps:
    """The gradients of the next bucket are written; ranks write them in different orders."""
    rank = state.ranks[r]
    if state.shared.abort:
        yield moved(state, r, rank._replace(at="raised"))
        return
    if setting.leaver == (rank.number, r):
        yield moved(state, r, rank._replace(at="leave"))
    order = range(len(setting.chunks)) if r % 2 == 0 else reversed(range(len(setting.chunks)))
    away = rank.posted | left_out_by(setting, r, rank)
    for bucket in order:
        if not away >> bucket & 1:
            break
    else:
        yield moved(state, r, rank._replace(at="end"))
        return
    yield with_gradient(setting, state, r, bucket, then="progress")


def with_gradient(setting: Setting, state: State, r: int, bucket: int, then: str) -> State:
    rank, own = state.ranks[r], state.cells[r]
    for chunk in range(setting.chunks[bucket]):
        i = index_of(setting, (bucket, chunk))
        if own[i][0] == HALF:
            raise Violation(f"rank {r} writes a gradient where a mean is being written")
        own = replaced(own, i, (GRADIENT, rank.number))
    posting = rank._replace(at="post", then=then, bucket=bucket, posted=rank.posted | 1 << bucket)
    return moved(state, r, posting, cells=replaced(state.cells, r, own))


@step("post", "Reducer::post", "arrived.fetch_add(1, std::memory_order_acq_rel)", "ring(1)", "kAfterPost")
def post(setting: Setting, state: State, r: int) -> Steps:
    rank, shared = state.ranks[r], state.shared
    arrived = shared.arrived[rank.bucket] + 1
    shared = shared._replace(arrived=replaced(shared.arrived, rank.bucket, arrived))
    following = rank._replace(at=rank.then, then="", bucket=-1)
    if rank.then == "progress":
        following = following._replace(then="mark", takes_all=False)
    after = moved(state, r, following, shared=shared)
    yield from ring(after, 1) if arrived == rank.number * setting.ranks else [after]


@step("progress", "Reducer::progress", "arrived.load(std::memory_order_acquire)", "session_.is_over()")
def progress(setting: Setting, state: State, r: int) -> Steps:
    """Look for a complete bucket, and at the abort word before each chunk."""
    rank, shared = state.ranks[r], state.shared
    if not (shared.abort and setting.mistake != "goes on after the end"):
        for bucket, chunks in enumerate(setting.chunks):
            most = chunks if rank.takes_all else -(-chunks // setting.ranks)
            is_open = rank.posted >> bucket & 1 and not rank.exhausted >> bucket & 1
            if is_open and rank.done[bucket] < most and shared.arrived[bucket] >= rank.number * setting.ranks:
                yield moved(state, r, rank._replace(at="claim", bucket=bucket))
                return
    yield moved(state, r, rank._replace(at=rank.then, then=""))


@step("claim", "Reducer::claim_chunk", "claim.compare_exchange_weak", "kChunkClaimed")
def claim(setting: Setting, state: State, r: int) -> Steps:
    rank, shared = state.ranks[r], state.shared
    bucket = rank.bucket
    if setting.assigned:
        chunk = (r + setting.ranks - bucket % setting.ranks) % setting.ranks + rank.done[
            bucket
        ] * setting.ranks
    else:
        number, chunk = max(shared.claim[bucket], (rank.number, 0))
        taken = replaced(shared.claim, bucket, (number, chunk + 1))
    if chunk >= setting.chunks[bucket]:
        yield moved(state, r, rank._replace(at="progress", exhausted=rank.exhausted | 1 << bucket, bucket=-1))
        return
    if not setting.assigned:
        shared = shared._replace(claim=taken)
    late = rank.late_claims + shared.abort
    if late > 1:
        raise Violation(f"rank {r} goes on reducing after the end of the group")
    yield moved(
        state,
        r,
        rank._replace(at="read", chunk=(bucket, chunk), bucket=-1, late_claims=late),
        shared=shared,
    )


@step("read", "Reducer::reduce_chunk")
def read(setting: Setting, state: State, r: int) -> Steps:
    rank = state.ranks[r]
    i = index_of(setting, rank.chunk)
    for other, cells in enumerate(state.cells):
        owner = state.ranks[other]
        if is_given_up(owner) or state.shared.abort:
            continue  # the result is never used: the count never becomes complete
        if owner.number != rank.number or owner.at == "finished":
            raise Violation(f"rank {r} reads the memory of rank {other}, whose backward is over")
        if cells[i] != (GRADIENT, rank.number):
            raise Violation(f"rank {r} reduces chunk {rank.chunk}: rank {other} has {cells[i]}")
    yield moved(state, r, rank._replace(at="write"), cells=with_cells(setting, state, r, HALF))


@step("write", "Reducer::reduce_chunk", "kChunkReduced")
def write(setting: Setting, state: State, r: int) -> Steps:
    yield moved(state, r, state.ranks[r]._replace(at="count"), cells=with_cells(setting, state, r, MEAN))


def is_given_up(rank: Rank) -> bool:
    return rank.at in ("raised", "dead", "left")


def with_cells(setting: Setting, state: State, r: int, what: str) -> Cells:
    rank = state.ranks[r]
    i = index_of(setting, rank.chunk)
    for other, owner in enumerate(state.ranks):
        # A rank that raised has left its gradient buffer: later writes of a continued rank do no harm there.
        is_over = owner.at == "finished" or owner.number != rank.number
        if is_over and not is_given_up(owner):
            raise Violation(f"rank {r} writes into memory of rank {other}, whose backward is over")
    return tuple(replaced(cells, i, (what, rank.number)) for cells in state.cells)


@step("count", "count_up(control().chunks_done", "bool count_up(", "ring(kWakeAll)")
def count(setting: Setting, state: State, r: int) -> Steps:
    rank, shared = state.ranks[r], state.shared
    bucket = rank.chunk[0]
    shared = shared._replace(chunks_done=shared.chunks_done + 1)
    counted = rank._replace(
        at="progress", chunk=None, done=replaced(rank.done, bucket, rank.done[bucket] + 1)
    )
    after = moved(state, r, counted, shared=shared)
    is_last = shared.chunks_done == rank.number * setting.total and setting.mistake != "no ring at the end"
    yield from ring(after, all_ranks(setting)) if is_last else [after]


# --- its end ---


@step("end", "Reducer::finish", "kBeforeEnd", "bits[p / 64] |= uint64_t{1}", "own.status = status.pack();")
def end(setting: Setting, state: State, r: int) -> Steps:
    """Write down the buckets that were left out; no rank reads them before all have ended."""
    rank = state.ranks[r]
    if state.shared.abort:
        yield moved(state, r, rank._replace(at="raised"))
        return
    left_out, kind = left_out_by(setting, r, rank), backward_of(setting, rank)
    report = (rank.number, left_out, kind.finished != r)
    reports = replaced(state.reports, r, replaced(state.reports[r], place_of(setting, rank), report))
    allows = kind.is_allowed_by(r) or (
        kind.globally_unused and setting.mistake != "no zeros for globally unused"
    )
    at = "zeros" if left_out and allows else "add flags"
    yield moved(state._replace(reports=reports), r, rank._replace(at=at))


def place_of(setting: Setting, rank: Rank) -> int:
    return 0 if setting.mistake == "one place for what is left out" else rank.number & 1


@step("zeros", "Reducer::add_unused", "memset(gradient_buffer() + offset")
def zeros(setting: Setting, state: State, r: int) -> Steps:
    """Post zeros for buckets that the rank left out and that other ranks may complete."""
    rank = state.ranks[r]
    missing = left_out_by(setting, r, rank) & ~rank.posted
    if missing:
        yield with_gradient(setting, state, r, first_of(missing), then="zeros")
    else:
        yield moved(state, r, rank._replace(at="add flags"))


@step("add flags", "flags |= kBackwardUnusedRefused", "flags.fetch_or(flags, std::memory_order_relaxed)")
def add_flags(setting: Setting, state: State, r: int) -> Steps:
    rank, shared = state.ranks[r], state.shared
    if setting.mistake == "compares too early":
        list(compare(setting, state, r))
    shared = shared._replace(flags=shared.flags | flags_of(setting, r, rank))
    yield moved(state, r, rank._replace(at="count end"), shared=shared)


def flags_of(setting: Setting, r: int, rank: Rank) -> int:
    if not left_out_by(setting, r, rank):
        return 0
    return UNUSED if backward_of(setting, rank).is_allowed_by(r) else UNUSED | REFUSED


@step("count end", "Reducer::end_backward", "ended.fetch_add(1, std::memory_order_acq_rel)")
def count_end(setting: Setting, state: State, r: int) -> Steps:
    rank, shared = state.ranks[r], state.shared
    shared = shared._replace(ended=shared.ended + 1)
    is_last = shared.ended == rank.number * setting.ranks
    following = rank._replace(at="publish" if is_last else "announce", awaits="ended")
    yield moved(state, r, following, shared=shared)


@step("publish", "verdict.store(", "count_up(shared.ended_backward, backward_)")
def publish(setting: Setting, state: State, r: int) -> Steps:
    """The last rank to end publishes the verdict, unless a rank has given the backward up."""
    rank, shared = state.ranks[r], state.shared
    if not shared.ended_poisoned:
        shared = shared._replace(flags=0, verdict=shared.flags, ended_backward=rank.number)
    yield from ring(moved(state, r, rank._replace(at="announce"), shared=shared), all_ranks(setting))


@step("go on", "kAfterEnd", "(verdict & kBackwardUnusedRefused) != 0 && allow_globally_unused")
def go_on(setting: Setting, state: State, r: int) -> Steps:
    rank = state.ranks[r]
    own = setting.mistake == "decides by its own flags"
    verdict = flags_of(setting, r, rank) if own else state.shared.verdict
    if not verdict & REFUSED:
        yield moved(state, r, rank._replace(at="announce", awaits="means"))
    elif backward_of(setting, rank).globally_unused:
        yield moved(state, r, rank._replace(at="compare"))
    else:
        yield moved(state, r, rank._replace(at="restart", awaits="void"))


@step("compare", "Reducer::is_unused_alike", ".finished) continue", "restart_without_reduction()")
def compare(setting: Setting, state: State, r: int) -> Steps:
    """If the ranks left different buckets out, the backward is void."""
    rank = state.ranks[r]
    left_out: set[int] = set()
    for other, places in enumerate(state.reports):
        number, buckets, has_data = places[place_of(setting, rank)]
        if number != rank.number:
            raise Violation(
                f"rank {r} reads in iteration {rank.number} what rank {other} left out in {number}"
            )
        if has_data or setting.mistake == "ranks without data count":
            left_out.add(buckets)
    if len(left_out) <= 1:
        yield moved(state, r, rank._replace(at="announce", awaits="means"))
    else:
        yield moved(state, r, rank._replace(at="restart", awaits="void"))


@step("restart", "Reducer::restart_without_reduction", "count_up(shared.restarted, target)")
def restart(setting: Setting, state: State, r: int) -> Steps:
    rank, shared = state.ranks[r], state.shared
    shared = shared._replace(restarted=shared.restarted + 1)
    after = moved(state, r, rank._replace(at="announce"), shared=shared)
    is_last = shared.restarted == target_of(setting, rank)
    yield from ring(after, all_ranks(setting)) if is_last else [after]


def target_of(setting: Setting, rank: Rank) -> int:
    return (2 * rank.restarts + (1 if rank.awaits == "void" else 2)) * setting.ranks


@step("reset", "chunks_done.store(", "arrived.store(")
def reset(setting: Setting, state: State, r: int) -> Steps:
    """Rank 0 sets the counters to their values at the end of the backward."""
    rank, shared = state.ranks[r], state.shared
    if r == 0 and setting.mistake != "no reset":
        buckets = len(setting.chunks)
        shared = shared._replace(
            arrived=(rank.number * setting.ranks,) * buckets,
            claim=((rank.number, 99),) * buckets,
            chunks_done=rank.number * setting.total,
        )
    yield moved(state, r, rank._replace(at="restart", awaits="reset"), shared=shared)


@step("return", "Reducer::copy_back", "finished_backwards_ = backward_")
def return_(setting: Setting, state: State, r: int) -> Steps:
    rank = state.ranks[r]
    is_void = rank.awaits == "reset"
    if is_void == backward_of(setting, rank).is_good(setting.ranks):
        raise Violation(f"rank {r} finds backward {rank.number} {'void' if is_void else 'good'}")
    if not is_void and any(cell != (MEAN, rank.number) for cell in state.cells[r]):
        raise Violation(f"rank {r} returns from iteration {rank.number} with {state.cells[r]}")
    is_last = rank.number == len(setting.backwards)
    yield moved(
        state,
        r,
        rank._replace(
            at="finished" if is_last else "begin",
            awaits="",
            number=rank.number + (not is_last),
            good=rank.good + (not is_void),
            restarts=rank.restarts + is_void,
        ),
    )


# --- waiting ---


@step("announce", "Session::wait_until", "count.fetch_add(1, std::memory_order_seq_cst)")
def announce(setting: Setting, state: State, r: int) -> Steps:
    shared = state.shared._replace(sleepers=state.shared.sleepers + 1)
    yield moved(state, r, state.ranks[r]._replace(at="look at the bell"), shared=shared)


@step(
    "look at the bell", "word.load(std::memory_order_seq_cst)", "departures.load(std::memory_order_seq_cst)"
)
def look_at_the_bell(setting: Setting, state: State, r: int) -> Steps:
    rank = state.ranks[r]._replace(seen=(state.shared.bell, state.shared.departures))
    if rank.awaits in ("ended", "means"):
        yield moved(state, r, rank._replace(at="progress", then="look", takes_all=True))
    else:
        yield moved(state, r, rank._replace(at="look"))


@step("look", "ready()", "fail_from_abort", "kLifeLeft")
def look(setting: Setting, state: State, r: int) -> Steps:
    rank, shared = state.ranks[r], state.shared
    if is_ready(setting, shared, rank):
        yield moved(state, r, rank._replace(at="stop waiting", seen=(-1, -1)))
    elif shared.abort:
        yield moved(state, r, rank._replace(at="give up"))
    elif any(other.at == "left" for other in state.ranks):
        yield end_group(moved(state, r, rank._replace(at="give up")))
    else:
        yield moved(state, r, rank._replace(at="sleep"))


def is_ready(setting: Setting, shared: Shared, rank: Rank) -> bool:
    if rank.awaits == "ended":
        return shared.ended_backward >= rank.number
    if rank.awaits == "means":
        return shared.chunks_done >= rank.number * setting.total and not shared.chunks_poisoned
    return shared.restarted >= target_of(setting, rank)


@step("sleep", "futex_wait_any(waits, wake_ns)")
def sleep(setting: Setting, state: State, r: int) -> Steps:
    rank, shared = state.ranks[r], state.shared
    has_changed = rank.seen != (shared.bell, shared.departures) or shared.abort
    compares = setting.mistake != "sleeps without comparing"
    yield moved(state, r, rank._replace(at="look at the bell", asleep=not (compares and has_changed)))


@step("stop waiting", "count.fetch_sub(1, std::memory_order_seq_cst)")
def stop_waiting(setting: Setting, state: State, r: int) -> Steps:
    rank = state.ranks[r]
    shared = state.shared._replace(sleepers=state.shared.sleepers - 1)
    following = {"ended": "go on", "means": "return", "void": "reset", "reset": "return"}[rank.awaits]
    yield moved(state, r, rank._replace(at=following), shared=shared)


@step("give up", "fail_from_abort", "bool settle(", "seen | kPoison")
def give_up(setting: Setting, state: State, r: int) -> Steps:
    """One atomic decides for all ranks whether the backward is good: it is complete, or it is poisoned."""
    rank, shared = state.ranks[r], state.shared
    if rank.awaits == "ended":
        is_complete = shared.ended_backward >= rank.number
        poisoned = shared._replace(ended_poisoned=True)
    else:
        is_complete = is_ready(setting, shared, rank)
        poisoned = shared._replace(chunks_poisoned=True) if rank.awaits == "means" else shared
    if is_complete and setting.mistake != "each decides alone":
        yield moved(state, r, rank._replace(at="stop waiting", seen=(-1, -1)))
        return
    shared = shared if setting.mistake == "each decides alone" else poisoned
    raised = rank._replace(at="raised", seen=(-1, -1))
    yield moved(state, r, raised, shared=shared._replace(sleepers=shared.sleepers - 1))


# --- faults and departures of a rank ---


@step("leave", "Session::close", "departures.fetch_add(1, std::memory_order_seq_cst)")
def leave(setting: Setting, state: State, r: int) -> Steps:
    shared = state.shared._replace(departures=state.shared.departures + 1)
    yield from woken(moved(state, r, state.ranks[r]._replace(at="left"), shared=shared), setting.ranks)


def end_group(state: State) -> State:
    """abort_group: set the abort word and wake every waiter."""
    (after,) = woken(state._replace(shared=state.shared._replace(abort=True)), len(state.ranks))
    return after


def from_outside(setting: Setting, state: State) -> Steps:
    """A death, the liveness thread that notices it, and a deadline."""
    shared = state.shared
    for r, rank in enumerate(state.ranks):
        if rank.at in OVER:
            continue
        if shared.deaths:
            dead = rank._replace(at="dead", asleep=False)
            yield moved(state, r, dead, shared=shared._replace(deaths=shared.deaths - 1))
        if shared.deadlines and (rank.asleep or rank.at == "sleep"):
            late = rank._replace(at="give up", asleep=False)
            left = shared._replace(deadlines=shared.deadlines - 1)
            yield end_group(moved(state, r, late, shared=left))
    if not shared.abort and any(rank.at == "dead" for rank in state.ranks):
        yield end_group(state)
