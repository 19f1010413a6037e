"""How workers of Ray become ranks; a real cluster: tests/launch/test_ray.py."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pickle

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


def test_each_rank_is_told_its_place() -> None:
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
    key, environment = ray._Worker().call(own, pickle.loads(pickle.dumps(made)), program, ())
    assert key == made.key
    assert "RANK" in environment and made.key.decode() not in environment
    users = {secret.TEXT_VARIABLE: "correct horse battery staple"}
    assert ray.secret_for_workers(users).key == users[secret.TEXT_VARIABLE].encode()


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
def test_wrong_arguments_are_told_before_ray_is_asked(options: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ray.run(print, **options)  # type: ignore[arg-type]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_so() -> None:
    with pytest.raises(ConfigError, match="pip install ray"):
        ray.run(print, num_workers=2)
