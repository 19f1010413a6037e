"""paceline.env reads the variables that the launcher writes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.env import RankEnvironment, read_rank_environment
from paceline.launch.ports import free_ports
from paceline.launch.variables import MasterAddress, new_job_id, rank_environment


@given(st.integers(1, 128), st.data())
def test_what_is_written_is_read(nprocs: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, nprocs - 1))
    master_address = MasterAddress("127.0.0.1", 20000, tuple(range(20001, 20001 + nprocs)), new_job_id())
    inherited = {"RANK": "77", "TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "/home/x"}
    environ = rank_environment(
        rank, nprocs, master_address, inherited, num_threads=2, is_threads_given=False, has_gpu=False
    )
    assert read_rank_environment(environ) == RankEnvironment(
        rank, nprocs, rank, nprocs, "127.0.0.1", 20000, master_address.job_id
    )
    assert environ["HOME"] == "/home/x"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environ
    paddle = {name: value for name, value in environ.items() if name.startswith("PADDLE_")}
    read = read_rank_environment(paddle)
    assert (read.rank, read.world_size, read.local_rank) == (rank, nprocs, rank)
    assert paddle["PADDLE_CURRENT_ENDPOINT"] == paddle["PADDLE_TRAINER_ENDPOINTS"].split(",")[rank]


def test_two_launches_share_no_id() -> None:
    assert len({new_job_id() for _ in range(100)}) == 100


def test_free_ports_differ() -> None:
    assert len(set(free_ports(50))) == 50
