"""The environment of a rank, as every launcher writes it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.env import (
    RankEnvironment,
    job_id_from_environment,
    may_span_hosts,
    read_rank_environment,
    split_address,
)
from paceline.errors import ConfigError
from paceline.launchers import first_slurm_host, slurm_tasks_per_node

LAUNCHING = Path(__file__).resolve().parents[2] / "docs" / "launching.md"
TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


def test_torch_variables() -> None:
    environ = TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "PACELINE_JOB_ID": "abc"}
    assert read_rank_environment(environ) == RankEnvironment(1, 4, 1, 2, "host0", 29500, "abc")


def test_what_the_launcher_does_not_say_is_none() -> None:
    env = read_rank_environment(TORCH)
    assert (env.local_rank, env.local_world_size, env.job_id) == (None, None, "")


def test_arguments_win_over_variables() -> None:
    env = read_rank_environment(TORCH, rank=3, world_size=5, address="other:1234", job_id="mine")
    assert (env.rank, env.world_size, env.master_addr, env.master_port) == (3, 5, "other", 1234)
    assert env.job_id == "mine"


def test_arguments_alone_are_enough() -> None:
    env = read_rank_environment({}, rank=0, world_size=2, address="[::1]:80")
    assert (env.rank, env.world_size, env.master_addr, env.master_port) == (0, 2, "::1", 80)


def test_one_rank_needs_no_address() -> None:
    assert read_rank_environment({}, rank=0, world_size=1).master_addr == "127.0.0.1"


def test_paddle_variables() -> None:
    environ = {
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.1:6171",
    }
    env = read_rank_environment(environ)
    assert (env.rank, env.world_size, env.local_rank) == (1, 2, 1)
    assert (env.master_addr, env.master_port) == ("10.0.0.1", 6170)
    assert read_rank_environment(environ | {"PADDLE_MASTER": "m:77"}).master_port == 77


def test_open_mpi_on_one_host_needs_nothing_else() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
        "PMIX_NAMESPACE": "3713990657",
    }
    env = read_rank_environment(environ)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (2, 3, 2, 3)
    assert env.master_addr == "127.0.0.1"
    assert 16384 <= env.master_port < 32768
    assert env.master_port == read_rank_environment(environ | {"OMPI_COMM_WORLD_RANK": "0"}).master_port


MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        # As Open MPI 4.1 and 5.0 set them.
        (
            {
                "PMIX_NAMESPACE": "1138819073",
                "OMPI_MCA_orte_hnp_uri": "1138819072.0;tcp://10.0.0.1,172.17.0.1:35907;tcp6://[fd00::2]:51543",
            },
            "10.0.0.1",
        ),
        ({"PMIX_NAMESPACE": "prterun-login-node-12356@1"}, "login-node"),
    ],
)
def test_open_mpi_on_two_hosts_connects_to_the_host_of_mpirun(
    variables: dict[str, str], address: str
) -> None:
    env = read_rank_environment(MPIRUN | variables)
    assert (env.master_addr, env.job_id) == (address, f"pmix-{variables['PMIX_NAMESPACE']}")
    first = read_rank_environment(MPIRUN | variables | {"OMPI_COMM_WORLD_RANK": "0"})
    assert env.master_port == first.master_port
    assert read_rank_environment(MPIRUN | variables | {"MASTER_ADDR": "mine"}).master_addr == "mine"


def test_open_mpi_on_two_hosts_without_an_address_is_refused_with_its_variables() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR") as caught:
        read_rank_environment(MPIRUN)
    assert "OMPI_COMM_WORLD_LOCAL_SIZE=2" in caught.value.seen
    assert "missing  MASTER_ADDR" in caught.value.seen
    (shown,) = re.findall(r"^```\n(MASTER_ADDR is .*?)\n```$", LAUNCHING.read_text(), re.M | re.S)
    assert str(caught.value) == shown


MPIEXEC = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_mpich_meets_where_mpiexec_listens_for_its_proxies() -> None:
    env = read_rank_environment(MPIEXEC | {"PACELINE_MPIEXEC": "node0:38899"})
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (1, 4, 1, 2)
    assert (env.master_addr, env.job_id) == ("node0", "mpiexec-node0:38899")
    assert env.master_port != read_rank_environment(MPIEXEC | {"PACELINE_MPIEXEC": "node0:38900"}).master_port


def test_mpich_on_one_host_needs_no_name_of_it() -> None:
    env = read_rank_environment(MPIEXEC | {"PMI_SIZE": "2", "PACELINE_MPIEXEC": "node0:38899"})
    assert env.master_addr == "127.0.0.1"


def test_srun_that_speaks_pmi_is_slurm_still() -> None:
    env = read_rank_environment(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"})
    assert (env.master_addr, env.local_rank) == ("gpu07", 1)


def test_mpiexec_within_an_allocation_of_slurm_is_mpich() -> None:
    # The proxies are tasks of a separate step, which the ranks inherit.
    env = read_rank_environment(SLURM | MPIEXEC | {"PACELINE_MPIEXEC": "gpu07:38899"})
    assert (env.rank, env.world_size, env.job_id) == (1, 4, "mpiexec-gpu07:38899")


def test_pods_of_a_leader_worker_set() -> None:
    environ = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "3", "LWS_LEADER_ADDRESS": "job-0.job.default"}
    env = read_rank_environment(environ)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (1, 3, 0, 1)
    assert (env.master_addr, env.master_port) == ("job-0.job.default", 29500)


def test_pods_of_an_indexed_job() -> None:
    environ = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0.job"}
    env = read_rank_environment(environ)
    assert (env.rank, env.local_rank, env.local_world_size, env.master_port) == (1, 0, 1, 29500)
    assert read_rank_environment(environ | TORCH).world_size == 4  # torchrun within the pod


def test_a_pod_that_does_a_piece_of_work_alone_is_not_a_rank() -> None:
    with pytest.raises(ConfigError, match="plain python") as caught:
        read_rank_environment({"JOB_COMPLETION_INDEX": "1"})
    assert not hasattr(caught.value, "variable")


@pytest.mark.parametrize(
    ("environ", "variable", "launcher"),
    [
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "RANK", "torchrun"),
        ({"LOCAL_RANK": "0"}, "RANK", "torchrun"),
        ({"PADDLE_TRAINERS_NUM": "2", "PADDLE_MASTER": "h:1"}, "PADDLE_TRAINER_ID", "paddle"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK", "Open MPI"),
        ({"OMPI_COMM_WORLD_RANK": "0", "MASTER_ADDR": "h"}, "OMPI_COMM_WORLD_SIZE", "Open MPI"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE", "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "MASTER_PORT", "torchrun"),
    ],
)
def test_half_set_variables_are_listed_with_what_is_missing(
    environ: dict[str, str], variable: str, launcher: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rank_environment(environ)
    assert caught.value.variable == variable  # type: ignore[attr-defined]
    assert launcher in caught.value.where
    found, missing = caught.value.seen.splitlines()
    assert all(f"{name}={value}" in found for name, value in environ.items())
    assert variable in missing


@pytest.mark.parametrize(
    ("environ", "summary", "hint"),
    [
        (
            {},
            "No launcher's variables are set, so this process does not know its rank",
            "`paceline run -n 2 script.py`",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            "No launcher has started this process, so it",
            "`srun -n 2",
        ),
        (
            {"JOB_COMPLETION_INDEX": "1"},
            "No launcher has started this process",
            "with a pod of an indexed Job",
        ),
        ({"LWS_GROUP_SIZE": "2"}, "LeaderWorkerSet are half set", "with a pod of a LeaderWorkerSet"),
    ],
)
def test_what_is_said_to_a_process_without_a_rank(environ: dict[str, str], summary: str, hint: str) -> None:
    """No message that nothing is set, above a list of variables; nor a pod in the place of a command."""
    with pytest.raises(ConfigError) as caught:
        read_rank_environment(environ)
    assert summary in caught.value.summary
    assert hint in caught.value.hint
    assert all(f"{name}={value}" in caught.value.seen for name, value in environ.items())


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_slurm_variables() -> None:
    env = read_rank_environment(SLURM)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (5, 8, 1, None)
    assert (env.master_addr, env.job_id) == ("gpu07", "slurm-4711.0")
    assert env.master_port != read_rank_environment(SLURM | {"SLURM_STEP_ID": "1"}).master_port


@pytest.mark.parametrize(("node", "size"), [("0", 2), ("2", 2), ("3", 1), ("4", None), ("", None)])
def test_slurms_variables_show_how_many_ranks_each_host_has(node: str, size: int | None) -> None:
    environ = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": node, "SLURM_LOCALID": "0"}
    assert read_rank_environment(environ).local_world_size == size


@pytest.mark.parametrize(
    ("text", "tasks"), [("4", [4]), ("2(x2)", [2, 2]), ("3,2(x2),1", [3, 2, 2, 1]), ("", []), ("2(x", [])]
)
def test_slurm_tasks_per_node(text: str, tasks: list[int]) -> None:
    assert slurm_tasks_per_node(text) == tasks


def test_a_slurm_batch_script_is_not_a_rank() -> None:
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    with pytest.raises(ConfigError, match="plain python") as caught:
        read_rank_environment(batch)
    assert "SLURM_STEP_ID, which srun sets, is missing" in caught.value.seen
    assert "srun" in caught.value.hint


def test_torch_variables_win_over_slurm() -> None:
    assert read_rank_environment(SLURM | TORCH).rank == 1


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("rack2-n[1,5]-ib", "rack2-n1-ib"),
        ("", ""),
    ],
)
def test_first_slurm_host(nodelist: str, host: str) -> None:
    assert first_slurm_host(nodelist) == host


@pytest.mark.parametrize(
    ("change", "variable", "shown"),
    [
        ({"RANK": "4"}, "RANK", "'4'"),
        ({"RANK": "-1"}, "RANK", "'-1'"),
        ({"RANK": "one"}, "RANK", "'one'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE", "'0'"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE", "'2.0'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE", "empty"),
        ({"LOCAL_RANK": "9"}, "LOCAL_RANK", "'9'"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK", "'2'"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE", "'5'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT", "'70000'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT", "'http'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT", "not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR", "not set"),
    ],
)
def test_bad_variables_are_named_with_their_value(change: dict[str, str], variable: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rank_environment(TORCH | change)
    assert caught.value.variable == variable  # type: ignore[attr-defined]
    assert variable in str(caught.value)
    assert shown in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "2"}, "0 to 1: there are 2 ranks on this host (LOCAL_WOR"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "0: there is 1 rank on this host (LOCAL_WORLD_SIZE)"),
        ({"LOCAL_RANK": "5"}, "0 to 3: there are 4 ranks\n"),
        ({"RANK": "5"}, "every rank is started with its own rank"),
        ({"MASTER_PORT": "999999"}, "MASTER_PORT=29500, or another free port"),
        ({"MASTER_ADDR": "node0:port", "MASTER_PORT": ""}, "MASTER_ADDR=node0:29400"),
    ],
)
def test_what_is_said_of_a_bad_variable_is_about_it(change: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rank_environment(TORCH | change)
    assert words in str(caught.value)
    assert ("every rank is started" in str(caught.value)) == ("RANK" in "".join(change))


def test_what_is_said_of_a_bad_address_is_how_to_write_one_there() -> None:
    with pytest.raises(ConfigError) as caught:
        read_rank_environment({}, rank=0, world_size=2, address="h")
    assert caught.value.hint == 'address="node0:29400"'
    with pytest.raises(ConfigError) as caught:
        split_address("node0:0", "--rdzv")
    assert caught.value.hint == "--rdzv node0:29400"


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="world_size='0'"):
        read_rank_environment({}, rank=0, world_size=0)
    with pytest.raises(ConfigError, match="rank='2'"):
        read_rank_environment({}, rank=2, world_size=2, address="h:1")
    with pytest.raises(ConfigError, match="address='h'"):
        read_rank_environment({}, rank=0, world_size=2, address="h")


@given(st.dictionaries(st.sampled_from(sorted(TORCH | SLURM)), st.text(max_size=6)))
def test_any_environment_is_read_or_refused(environ: dict[str, str]) -> None:
    try:
        env = read_rank_environment(environ)
    except ConfigError:
        return
    assert 0 <= env.rank < env.world_size
    assert env.master_addr
    assert 0 <= env.master_port < 65536


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, False),
        ({"LOCAL_WORLD_SIZE": "2"}, True),
        ({"MASTER_ADDR": "node0"}, True),
        ({"MASTER_ADDR": "10.0.0.1"}, True),
        ({"MASTER_ADDR": "localhost"}, False),
        ({"MASTER_ADDR": "127.0.0.1"}, False),
        ({"MASTER_ADDR": "::1"}, False),
        # Kubeflow's pod of rank 0, which the others know by a name.
        ({"MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, True),
        ({"MASTER_ADDR": "localhost", "SLURM_STEP_NUM_NODES": "2"}, True),
        ({"MASTER_ADDR": "node0", "SLURM_STEP_NUM_NODES": "1"}, False),
        ({"MASTER_ADDR": "node0", "PADDLE_TRAINER_ENDPOINTS": "node0:1,node0:2,node0:3,node0:4"}, False),
        ({"MASTER_ADDR": "node0", "PADDLE_TRAINER_ENDPOINTS": "node0:1,node0:2,node1:1,node1:2"}, True),
    ],
)
def test_whether_ranks_may_be_on_several_hosts(environ: dict[str, str], expected: bool) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} | environ
    assert may_span_hosts(read_rank_environment(environ), environ) == expected


def test_job_ids() -> None:
    assert job_id_from_environment({}) == ""
    assert job_id_from_environment({"TORCHELASTIC_RUN_ID": "none"}) == ""
    assert job_id_from_environment({"TORCHELASTIC_RUN_ID": "x"}) == "torchelastic-x"
    assert job_id_from_environment({"TORCHELASTIC_RUN_ID": "x", "PACELINE_JOB_ID": "y"}) == "y"


def test_split_address_accepts_a_scheme() -> None:
    assert split_address("tcp://10.0.0.1:80", "address") == ("10.0.0.1", 80)
