"""`paceline.torch.init_process_group` with the variables of each launcher.

tests/launch and tests/hosts test the launchers themselves.
"""

from __future__ import annotations

import errno
import os
import socket

import pytest
import torch
import torch.distributed as dist

from paceline.errors import ConfigError, RendezvousError
from paceline.launch.ports import free_ports
from paceline.torch import DistributedDataParallel, init_process_group
from tests.harness import ranks, seccomp
from tests.multiprocess.rank_signals import publish, wait_until_published

ENVIRONMENTS = {
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-somewhere-{job}@1",
    },
    "mpiexec": {
        "PMI_RANK": "{rank}",
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "{rank}",
        "MPI_LOCALNRANKS": "2",
        "PACELINE_MPIEXEC": "somewhere:{job}",
    },
    "srun": {
        "SLURM_PROCID": "{rank}",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "{rank}",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "{job}",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "somewhere[1-2]",
    },
}


@pytest.mark.parametrize("launcher", sorted(ENVIRONMENTS))
@ranks(2, group=None)
def test_torch_gets_what_the_launcher_has_set(rank, launcher):
    job = os.environ["PACELINE_JOB_ID"]  # from the harness: the same on both ranks, and no other test's
    for name in [*os.environ]:
        if name.startswith(("MASTER", "PACELINE_JOB", "RANK", "WORLD", "LOCAL", "PADDLE", "TORCHELASTIC")):
            del os.environ[name]
    os.environ |= {name: value.format(rank=rank, job=job) for name, value in ENVIRONMENTS[launcher].items()}
    init_process_group("gloo", timeout=40)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    assert total.item() == 3.0
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [
        str(rank),
        "2",
        str(rank),
        "2",
    ]
    dist.destroy_process_group()


@ranks(1, group=None)
def test_a_single_process_needs_no_address(rank):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    init_process_group("gloo", rank=0, world_size=1)
    assert dist.get_world_size() == 1
    dist.destroy_process_group()


@ranks(1, group=None)
def test_another_job_at_the_address_is_named(rank):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(RendezvousError, match=r"Rank 0 of 2 .* could not open torch's store") as caught:
            init_process_group("gloo", rank=0, world_size=2, address=address, timeout=20)
    assert f"pid {os.getpid()}" in caught.value.seen
    assert not dist.is_initialized()


@pytest.mark.skipif(not seccomp.is_supported(), reason="numbers of system calls unknown")
@ranks(1, group=None)
def test_a_store_that_cannot_start_its_thread_blames_no_other_job(rank):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    seccomp.refuse("clone3", errno.EAGAIN)
    with pytest.raises(RendezvousError, match=r"Rank 0 of 2 .* could not open torch's store") as caught:
        init_process_group("gloo", rank=0, world_size=2, address=address, timeout=20)
    assert "Resource temporarily unavailable" in caught.value.seen
    assert "as many processes and threads as it may" in caught.value.likely
    assert "`ulimit -u`" in caught.value.hint


@pytest.mark.parametrize("has_secret", [False, True], ids=["without a secret", "with secrets"])
@ranks(3, group=None)
def test_ranks_of_two_jobs_at_one_address_do_not_train_together(rank, has_secret, monkeypatch):
    """Processes started by hand without a job id: rank 0 of one job and rank 1 of another connect first.

    The third process is rank 1 of the first job. If each job has a secret, the first two never form one.
    """
    monkeypatch.delenv("PACELINE_JOB_ID")
    if has_secret:
        monkeypatch.setenv("PACELINE_SECRET", "one job" * 3 if rank != 1 else "another job" * 2)
    address = f"127.0.0.1:{os.environ['MASTER_PORT']}"
    if rank == 2:
        if has_secret:
            return  # it would wait for the first rank, which raises
        wait_until_published("formed", [0, 1])
    if rank == 2 or has_secret:
        words = "do not have the same secret" if has_secret else "Two processes claim rank 1 of 2"
        with pytest.raises(RendezvousError, match=words):
            init_process_group("gloo", rank=min(rank, 1), world_size=2, address=address, timeout=60)
    else:
        init_process_group("gloo", rank=rank, world_size=2, address=address, timeout=60)
    publish("formed", rank)
    if rank < 2 and not has_secret:
        wait_until_published("formed", [2])
        with pytest.raises(ConfigError, match="Two processes claim rank 1 of 2") as caught:
            DistributedDataParallel(torch.nn.Linear(2, 1))
        assert caught.value.seen.count("rank 1 on host") == 2 and "two jobs" in caught.value.likely
        dist.destroy_process_group()


@ranks(1, group=None)
def test_a_process_may_begin_again_at_the_same_address(rank):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    for _ in range(2):
        init_process_group("gloo", rank=0, world_size=1, address=address, timeout=20)
        dist.destroy_process_group()


def test_arguments_that_torch_cannot_use_are_refused():
    with pytest.raises(ConfigError, match="init_method"):
        init_process_group("gloo", init_method="env://")
    with pytest.raises(ConfigError, match="backend"):
        init_process_group(2)
    for unknown in ("glooo", "cpu:gloo,cuda:ncll"):
        with pytest.raises(ConfigError, match="backend") as caught:
            init_process_group(unknown)
        assert unknown in str(caught.value) and "gloo, " in caught.value.expected
    with pytest.raises(ConfigError, match="timeout"):
        init_process_group(timeout=-1)
    with pytest.raises(ConfigError, match="address"):
        init_process_group(address="host0")
