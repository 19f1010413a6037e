"""How workers of Ray become ranks; a real cluster: tests/integrations/test_ray.py."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pickle
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import ray
from paceline.env import read_rank_environment
from paceline.errors import ConfigError
from paceline.rendezvous import secret


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_ranks_of_a_node_are_neighbours(nodes: list[str]) -> None:
    order = ray.in_blocks(nodes)
    assert sorted(order) == list(range(len(nodes)))
    ranked = [nodes[place] for place in order]
    changes = sum(a != b for a, b in itertools.pairwise(ranked))
    assert changes == len(set(nodes)) - 1
    assert order[0] == 0


def test_each_rank_gets_its_place() -> None:
    places = [("a", "10.0.0.1"), ("a", "10.0.0.1"), ("b", "10.0.0.2")]
    read = [read_rank_environment(each) for each in ray.rank_variables(places, 29500, "j")]
    assert [(p.rank, p.local_rank, p.local_world_size) for p in read] == [(0, 0, 2), (1, 1, 2), (2, 0, 1)]
    assert {(p.world_size, p.master_addr, p.master_port, p.job_id) for p in read} == {
        (3, "10.0.0.1", 29500, "j")
    }


def test_each_job_has_a_secret_that_stands_in_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "_inherited", b"")
    monkeypatch.delenv(secret.FILE_VARIABLE, raising=False)
    monkeypatch.delenv(secret.TEXT_VARIABLE, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a worker changes it
    made, another = ray.secret_for_workers({}), ray.secret_for_workers({})
    assert made.key != another.key and len(made.key) == 64
    assert made.key.decode() not in repr(made)

    def program() -> tuple[bytes, str]:
        return secret.find_secret().key, repr(dict(os.environ))

    (own,) = ray.rank_variables([("a", "10.0.0.1")], 29500, "j")
    key, environment = ray._Worker().call(own, pickle.loads(pickle.dumps(made)), program, ()).result
    assert key == made.key
    assert "RANK" in environment and made.key.decode() not in environment
    users = {secret.TEXT_VARIABLE: "correct horse battery staple"}
    assert ray.secret_for_workers(users).key == users[secret.TEXT_VARIABLE].encode()


@pytest.mark.parametrize(
    ("nodes", "bundle", "count", "words"),
    [
        ([{"CPU": 4.0}], {"CPU": 8.0}, 1, "no node has 8 CPU for one worker: the largest has 4"),
        ([{"CPU": 4.0}], {"CPU": 1.0, "GPU": 1.0}, 1, "no node has 1 GPU for one worker: none has any"),
        ([], {"CPU": 1.0}, 1, "no node has 1 CPU for one worker: none has any"),
        ([{"CPU": 4.0}, {"CPU": 2.0}], {"CPU": 3.0}, 2, "the nodes hold 1 of the 2 workers"),
        ([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 8.0}], {"CPU": 1.0, "GPU": 0.5}, 3, "hold 2 of the 3"),
        ([{"CPU": 1.0}], {"CPU": 0.1}, 10, "other jobs of the cluster hold it"),
    ],
)
def test_it_says_what_keeps_workers_from_being_placed(nodes, bundle, count, words) -> None:  # type: ignore[no-untyped-def]
    assert words in ray.why_no_room(nodes, bundle, count)


def test_an_exception_comes_back_as_the_traceback_of_the_users_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "_inherited", b"")
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def call(fn: Callable[[], object]) -> ray._Outcome:
        return ray._Worker().call({}, ray.secret_for_workers({}), fn, ())

    def failing() -> None:
        raise ValueError("no such file")

    lines = call(failing).raised.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith("in failing")
    assert lines[-1] == "ValueError: no such file"
    assert call(sys.exit) == ray._Outcome()
    assert call(lambda: sys.exit(3)).raised.endswith("SystemExit: 3\n")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": 2, "resources": {"CPU": -1}}, "resources"),
        ({"num_workers": 2, "resources": {}}, "resources"),
        ({"num_workers": 2, "resources": {"CPU": 0}}, "resources"),
        ({"num_workers": 2, "args": "lr"}, "args"),
        ({"num_workers": 2, "forming_timeout_s": -1}, "forming_timeout_s"),
    ],
)
def test_wrong_arguments_are_reported_before_ray_is_asked(options: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ray.run(print, **options)  # type: ignore[arg-type]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_so() -> None:
    with pytest.raises(ConfigError, match="pip install ray"):
        ray.run(print, num_workers=2)
