"""Machines without futex_waitv, robust lists or vector units. Results have the same bits on all of them."""

from __future__ import annotations

import errno
import hashlib
import os
import signal

import numpy as np
import pytest

import paceline
from paceline import _core
from paceline.errors import PeerLostError
from tests.harness import ranks, run_ranks, seccomp
from tests.multiprocess.test_group_sequences import run_sequence


@pytest.mark.parametrize("without", [{0, 1, 2}, {1}])
@ranks(3, group=None)
def test_without_futex_waitv(rank, without):
    """All ranks lack it, as with a kernel before 5.16, or one does, as under a seccomp filter."""
    _core.disable_futex_waitv(rank in without)
    assert not _core.has_futex_waitv() or rank not in without
    job_id = os.environ["PACELINE_JOB_ID"]
    with paceline.init(rank=rank, world_size=3, job_id=job_id, timeout_s=60) as group:
        run_sequence(group, 11, 80)


def die_without_robust_list(rank, how, without):
    """Rank 1 dies; the other ranks return the lost ranks that their error names."""
    if rank in without:
        if how == "forbidden":
            seccomp.refuse("set_robust_list", errno.EPERM)
        else:
            _core.disable_robust_list(True)
    assert _core.has_robust_list() == (rank not in without)
    job_id = os.environ["PACELINE_JOB_ID"]
    group = paceline.init(rank=rank, world_size=3, job_id=job_id, timeout_s=60)
    group.subgroup([0, 1, 2]).close()  # leaving a group is not taken for a death
    group.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        group.barrier()
    return caught.value.lost


@pytest.mark.parametrize("without", [{0, 1, 2}, {1}])
@pytest.mark.parametrize("how", ["forbidden", "disabled"])
def test_a_death_is_noticed_without_a_robust_list(how, without):
    if how == "forbidden" and not seccomp.is_supported():
        pytest.skip("the number of the system call is not known")
    arguments = {"how": how, "without": without}
    results = run_ranks(die_without_robust_list, 3, arguments, group=None, dies={1: signal.SIGKILL})
    assert (results[0], results[2]) == ((1,), (1,))


def digest_of_means(group):
    """Hashes means and sums of random inputs, which depend on the order of additions."""
    digest = hashlib.sha256()
    random = np.random.default_rng(group.rank)
    for dtype in ("float32", "float64", "float16"):
        for count in (5, 4099, 100_003):
            array = random.standard_normal(count).astype(dtype)
            for op, weight in (("sum", 1.0), ("mean", 1.0), ("mean", 0.3 + group.rank)):
                result = array.copy()
                group.all_reduce(result, op, weight=weight)
                digest.update(result.tobytes())
    return os.environ["PACELINE_ISA"], _core.best_isa(), digest.hexdigest()


def test_same_bits_on_every_instruction_set(monkeypatch):
    results = []
    for isa in ("portable", "avx2", "avx512", "neon"):
        monkeypatch.setenv("PACELINE_ISA", isa)
        results += run_ranks(digest_of_means, 3)
    assert results[0][:2] == ("portable", 0)
    assert len({digest for *_, digest in results}) == 1
