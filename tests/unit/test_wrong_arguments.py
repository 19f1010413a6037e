"""Wrong arguments of `paceline` itself: groups, samplers, spawn and the launcher."""

from __future__ import annotations

import datetime
import functools
import os
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import paceline
from paceline import data
from paceline.arguments import Arguments
from paceline.env import read_rank_environment
from paceline.errors import ConfigError
from paceline.launch.process_tree import wait_readable
from paceline.launch.spawn_context import SpawnContext
from tests.unit.wrong_uses import INF, NAN, Use, check, each, each_shown


def init(**options: Any) -> paceline.Group:
    return paceline.init(**{"rank": 0, "world_size": 1, "job_id": "wrong", **options})


@pytest.fixture(scope="module")
def group() -> Any:
    with init() as group:
        yield group


def _joins() -> list[Use]:
    seconds = ("5", -1, 0, NAN, -INF, True, [5], datetime.timedelta(seconds=-1))
    return [
        *each("init", "rank", lambda v: init(rank=v), 0.0, "0", True, -1, 1, int, [0], 0.5),
        *each("init", "world_size", lambda v: init(world_size=v), 1.0, "1", 0, -2, True, 4096, 129),
        *each("init", "timeout_s", lambda v: init(timeout_s=v), *seconds),
        *each("init", "warn_after_s", lambda v: init(warn_after_s=v), "5", -1, NAN, False, {}),
        *each("init", "forming_timeout_s", lambda v: init(forming_timeout_s=v), "5", 0, -3, NAN, True),
        *each(
            "init",
            "address",
            lambda v: init(address=v),
            "localhost:99999",
            "localhost",
            ":29500",
            "localhost:",
            "localhost:-1",
            "localhost:http",
            29500,
            ("localhost", 29500),
            b"localhost:29500",
        ),
        *each("init", "job_id", lambda v: init(job_id=v), 7, b"a", ["a"]),
        *each("init", "name", lambda v: init(name=v), 7, None, b"a", "", "n" * 5000),
    ]


CALLS_OF_GROUP: dict[str, Any] = {
    "all_reduce": lambda g, **o: g.all_reduce(np.zeros(3, np.float32), **o),
    "reduce": lambda g, **o: g.reduce(np.zeros(3, np.float32), **o),
    "broadcast": lambda g, **o: g.broadcast(np.zeros(3), **o),
    "all_gather": lambda g, **o: g.all_gather(np.zeros(3), **o),
    "reduce_scatter": lambda g, **o: g.reduce_scatter(np.zeros((1, 3)), **o),
    "gather": lambda g, **o: g.gather(np.zeros(3), **o),
    "scatter": lambda g, **o: g.scatter(np.zeros((1, 3)), np.zeros(3), **o),
    "all_to_all": lambda g, **o: g.all_to_all(np.zeros((1, 3)), **o),
    "barrier": lambda g, **o: g.barrier(**o),
    "allocate": lambda g, **o: g.allocate(3, **o),
    "subgroup": lambda g, **o: g.subgroup([0], **o),
}


def _collectives() -> list[Use]:
    """The calls take the group first."""
    strided, frozen = np.zeros((4, 4), np.float32)[:, ::2], np.zeros(3, np.float32)
    frozen.flags.writeable = False
    no_arrays = ((None, "None"), ([1.0, 2.0], "list"), (3.0, "3.0"), ("abc", "'abc'"))
    objects = (np.array([None]), "object")
    uses: list[Use] = []
    for name, call in CALLS_OF_GROUP.items():
        uses += each(name, "timeout_s", lambda g, v, c=call: c(g, timeout_s=v), "5", -1, NAN, True)
    for name in ("all_reduce", "reduce", "reduce_scatter"):
        call = CALLS_OF_GROUP[name]
        uses += each(name, "op", lambda g, v, c=call: c(g, op=v), "average", 9, None, np.add)
    for name in ("reduce", "broadcast", "gather", "scatter"):
        call = CALLS_OF_GROUP[name]
        uses += each(name, "root", lambda g, v, c=call: c(g, root=v), 1, -1, "0", 0.0, None, True)
    mean = functools.partial(CALLS_OF_GROUP["all_reduce"], op="mean")
    uses += each("all_reduce", "weight", lambda g, v: mean(g, weight=v), "2", -1, NAN, INF, [1.0], np.ones(2))
    uses += each("all_reduce", "weight", lambda g, v: CALLS_OF_GROUP["all_reduce"](g, weight=v), 2.0)
    uses += each_shown(
        "all_reduce",
        "array",
        lambda g, v: g.all_reduce(v),
        *no_arrays,
        objects,
        (memoryview(b"abc"), "memoryview"),
        (strided, "strides"),
        (frozen, "read-only"),
        (np.zeros(3, ">f4"), "byte order"),
        (np.array(["a"]), "<U1"),
        (np.zeros(3, np.complex64), "complex64"),
    )
    for name in ("reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "all_to_all"):
        uses += each_shown(name, "array", lambda g, v, n=name: getattr(g, n)(v), *no_arrays)
    for name in ("reduce", "broadcast", "all_gather", "gather"):  # objects: addresses of this process
        bad = ((strided, "strides"), objects)
        uses += each_shown(name, "array", lambda g, v, n=name: getattr(g, n)(v), *bad)
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        bad = (([1.0], "list"), (np.zeros(7), "(7,)"), ("abc", "'abc'"))
        uses += each_shown(name, "out", lambda g, v, c=CALLS_OF_GROUP[name]: c(g, out=v), *bad)
    bad = (([1.0], "list"), (None, "None"))
    uses += each_shown("scatter", "out", lambda g, v: g.scatter(np.zeros((1, 3)), v), *bad)
    uses += each_shown("scatter", "array", lambda g, v: g.scatter(v, np.zeros(3)), *bad)
    for name in ("all_reduce", "reduce", "broadcast"):  # as text, "False" would begin a call and not end it
        call = lambda g, v, n=name: getattr(g, n)(np.zeros(3), async_op=v)  # noqa: E731
        uses += each(name, "async_op", call, "False", 2, [], np.zeros(2))
    ranks: tuple[Any, ...] = (None, 0, "0", [], [0, 0], [1], [-1], ["0"], [0.0], [True])
    uses += each("subgroup", "ranks", lambda g, v: g.subgroup(v), *ranks)
    shapes = ("3", None, -1, 2.0, (2, -1), ["2"], (2, 2.5), True)
    uses += each("allocate", "shape", lambda g, v: g.allocate(v), *shapes)
    uses += each("allocate", "dtype", lambda g, v: g.allocate(3, v), "float99", object, 7, "O", str)
    for name, other in (("send", "dst"), ("recv", "src")):
        call = lambda g, v, n=name: getattr(g, n)(np.zeros(3), v)  # noqa: E731
        uses += each(name, other, call, 0, 1, -1, "0", None, 0.0)
    return uses


def _samplers() -> list[Use]:
    class Endless:
        def __iter__(self) -> Any:
            return iter(())

    place = {"num_replicas": 2, "rank": 0}
    uses: list[Use] = []
    makers: dict[str, Any] = {
        "DistributedSampler": lambda **o: data.DistributedSampler(**{"dataset": range(9), **place, **o}),
        "DistributedBatchSampler": lambda **o: data.DistributedBatchSampler(
            **{"dataset": range(9), "batch_size": 2, **place, **o}
        ),
        "SubsetDistributedSampler": lambda **o: data.SubsetDistributedSampler(
            **{"indices": [1, 2], **place, **o}
        ),
        "WeightedDistributedSampler": lambda **o: data.WeightedDistributedSampler(
            **{"weights": [1.0, 2.0], **place, **o}
        ),
        "BucketedSampler": lambda **o: data.BucketedSampler(
            **{"lengths": [1, 2], "global_batch_size": 2, **place, **o}
        ),
        "ChunkedShuffle": lambda **o: data.ChunkedShuffle(
            **{"dataset": range(9), "block_size": 2, **place, **o}
        ),
        "DistributedStream": lambda **o: data.DistributedStream(
            **{"shards": ["a"], "read": iter, **place, **o}
        ),
        "EvaluationSampler": lambda **o: data.EvaluationSampler(**{"dataset": range(9), **place, **o}),
    }

    def rows(owners: tuple[str, ...], argument: str, *values: Any) -> None:
        for owner in owners:
            uses.extend(each(owner, argument, lambda v, m=makers[owner]: m(**{argument: v}), *values))

    every = tuple(makers)
    rows(every, "rank", "0", 0.0, 2, -1, True)
    rows(every, "num_replicas", "2", 2.0, 0, -1)
    seeded = tuple(name for name in every if name != "EvaluationSampler")
    rows(seeded, "seed", "0", 0.5, None)
    flagged = seeded[:-1]
    rows(flagged, "drop_last", "no", 2)
    rows(flagged, "pad", "no", [])
    rows(flagged, "reshuffle", "no")
    shuffled = tuple(name for name in seeded if name not in ("WeightedDistributedSampler", "ChunkedShuffle"))
    rows(shuffled, "shuffle", "yes", 3)
    sized = ("DistributedSampler", "DistributedBatchSampler", "ChunkedShuffle", "EvaluationSampler")
    for owner in sized:
        bad = ((None, "None"), (9, "9"), (Endless(), "Endless"), (range, "range"))
        uses += each_shown(owner, "dataset", lambda v, m=makers[owner]: m(dataset=v), *bad)
    rows(("DistributedBatchSampler",), "batch_size", "2", 0, -1, 2.0, True, None)
    rows(("BucketedSampler",), "global_batch_size", "2", 0, 1, 2.0, None)
    rows(("BucketedSampler",), "pool_batches", "2", 0, 2.5)
    rows(("BucketedSampler",), "lengths", None, "abc", [-1], [1.5], [[1]], [[1], [1, 2]], 7)
    rows(("SubsetDistributedSampler",), "indices", None, "abc", [-1], [1.5], [[1]], [[1], [1, 2]], 7, {1: 2})
    rows(
        ("WeightedDistributedSampler",),
        "weights",
        None,
        "abc",
        [-1.0],
        [NAN],
        [0.0],
        [[1.0]],
        [[1], [1, 2]],
        7,
        ["a"],
    )
    rows(("WeightedDistributedSampler",), "num_samples", "2", -1, 2.0, True)
    rows(("ChunkedShuffle",), "block_size", "2", 0, 2.0, None)
    rows(("ChunkedShuffle",), "window_blocks", "2", 0, 2.0)
    rows(("DistributedStream",), "shards", None, 7, {"a"})
    rows(("DistributedStream",), "read", None, "path")
    rows(("DistributedSampler",), "dataset_id", 7)
    sampler = makers["DistributedSampler"]()
    uses += each("set_epoch", "epoch", sampler.set_epoch, "1", -1, 1.5, None, True)
    uses += each("commit", "count", sampler.commit, "1", -1, 1.5, None, 99)
    uses += each("load_state_dict", "state", sampler.load_state_dict, None, {}, 7, "x", {"version": 1})
    good = sampler.state_dict()
    for key, value in (("epoch", "0"), ("epoch", -1), ("position", 1.5), ("position", 10), ("version", 2)):
        uses += each("load_state_dict", key, lambda v, k=key: sampler.load_state_dict({**good, k: v}), value)
    alone, solo = data.EvaluationSampler(range(1), 1, 0), SimpleNamespace(all_gather=lambda rows: rows[None])
    uses += each("gather", "root", lambda v: alone.gather([1.0], root=v), "0", 1, -1, 0.0)
    uses += each("gather", "group", lambda v: alone.gather([1.0], v), "gloo", 7)
    uses += each("gather", "rows", lambda v: alone.gather(v, solo), 7, None, "x")
    return uses


def _starts() -> list[Use]:
    def spawn(**options: Any) -> None:
        paceline.spawn(**{"fn": print, "nprocs": 1, **options})

    seconds = ("5", -1, NAN, INF, True)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return [
        *each("spawn", "fn", lambda v: spawn(fn=v), None, "train", 7),
        *each("spawn", "args", lambda v: spawn(args=v), 7, None),
        *each("spawn", "nprocs", lambda v: spawn(nprocs=v), "2", 0, -1, 2.0, True, 4096),
        *each("spawn", "join", lambda v: spawn(join=v), "yes"),
        *each("spawn", "daemon", lambda v: spawn(daemon=v), "yes"),
        *each("spawn", "start_method", lambda v: spawn(start_method=v), "fork", None, 7),
        *each("spawn", "master_port", lambda v: spawn(master_port=v), "29500", 99999, 0, -1, 29500.0, True),
        *each("spawn", "threads", lambda v: spawn(threads=v), "2", 0, -1, 1.5, True),
        *each("spawn", "bind", lambda v: spawn(bind=v), "core", None, 7),
        *each("spawn", "prefix", lambda v: spawn(prefix=v), "yes", None, True),
        *each("spawn", "log_dir", lambda v: spawn(log_dir=v), 7, b"logs", "/dev/null/logs", ""),
        *each("spawn", "timeout_s", lambda v: spawn(timeout_s=v), *seconds),
        *each("spawn", "grace_s", lambda v: spawn(grace_s=v), *seconds, None),
        *each("spawn", "exit_timeout_s", lambda v: spawn(exit_timeout_s=v), *seconds, None),
        *each("join", "timeout", lambda v: SpawnContext.join(None, v), "5", -1, NAN, True),
        *each(
            "environment",
            "RANK",
            lambda v: read_rank_environment({**environment, "RANK": v}),
            "one",
            "-1",
            "2",
            "0.0",
        ),
        *each(
            "environment",
            "WORLD_SIZE",
            lambda v: read_rank_environment({**environment, "WORLD_SIZE": v}),
            "two",
            "0",
        ),
        *each(
            "environment",
            "MASTER_PORT",
            lambda v: read_rank_environment({**environment, "MASTER_PORT": v}),
            "99999",
            "http",
            "-1",
        ),
    ]


@pytest.mark.parametrize("use", [*_joins(), *_samplers(), *_starts()], ids=str)
def test_wrong_arguments(use: Use) -> None:
    check(use)


@pytest.mark.parametrize("use", _collectives(), ids=str)
def test_wrong_arguments_of_collectives(use: Use, group: paceline.Group) -> None:
    check(replace(use, call=functools.partial(use.call, group)))


def test_what_means_the_right_thing_is_taken() -> None:
    """numpy's numbers, timedeltas, and times without an end."""
    minute = datetime.timedelta(minutes=1)
    one, zero = np.int64(1), np.int32(0)
    with init(rank=zero, world_size=one, timeout_s=minute, warn_after_s=np.float32(2.5)) as group:
        assert (group.rank, group.world_size, group._core.timeout_s) == (0, 1, 60.0)
        array = group.allocate((np.int16(2), 3), timeout_s=minute)
        for timeout_s in (minute, np.float64(3), 7, INF, None):
            group.all_reduce(array, "mean", weight=np.float32(2), timeout_s=timeout_s)
            group.broadcast(array, zero, timeout_s=timeout_s)
            work = group.all_reduce(array, async_op=True)
            work.wait(timeout_s)
        assert group.subgroup(np.array([0])).world_size == 1
        group.all_reduce(array, async_op=None)
        group.all_reduce(array, async_op=np.True_).wait()
    with init(name="long", timeout_s=INF, forming_timeout_s=INF) as group:
        group.barrier()
    with init(job_id=os.fsdecode(b"job \xff")) as group:  # as a variable of the environment may be
        group.barrier()
    sampler = data.DistributedSampler(range(5), np.int64(2), zero, np.True_, np.int8(3), drop_last=0, pad=1)
    assert len(list(sampler)) == 3


def test_a_launcher_waits_for_years() -> None:
    readable, writable = os.pipe()
    os.write(writable, b"x")
    assert wait_readable([readable], 1e9) == {readable}
    os.close(readable)
    os.close(writable)


@pytest.mark.parametrize(
    ("choices", "expected"), [("a", '"a"'), ("ab", '"a" or "b"'), ("abc", '"a", "b" or "c"')]
)
def test_choices_are_listed(choices: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Arguments("f").choice("x", "d", choices)
    assert caught.value.expected == expected


def test_words_are_short_and_whole() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    error = Arguments("f").refuse("x", Silent(), "a number", "x=1")
    assert str(error).splitlines() == [
        "f: x=<Silent instance> is not usable.",
        "  expected a number",
        "  got      <Silent instance>, of type Silent",
        "  hint     x=1",
    ]
    grid = np.zeros((10**3, 10**3))
    for huge in (
        list(range(10**6)),
        "x" * 10**6,
        {n: n for n in range(10**5)},
        grid,
        [grid] * 8,
        {0: [grid]},
    ):
        assert len(str(Arguments("f").refuse("x", huge, "a number", "x=1"))) < 400
    assert pickle.loads(pickle.dumps(error)).argument == "x"
