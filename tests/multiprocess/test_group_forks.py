"""Forked children do not keep the ranks' shared memory. A child that reads it dies with an explanation."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import numpy as np

from tests.harness import ranks

_MIB = 1 << 20


def regions_of(pid):
    """Returns the descriptors and mappings of regions in a process."""
    descriptors = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            descriptors.append(os.readlink(each))
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [each for each in descriptors + maps if "/memfd:paceline (" in each]


def fork(program):
    """Forks a child that runs `program`. Returns its pid and a pipe of its stderr."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(writing, 2)
            os.close(writing)
            program()
            os._exit(0)
        except BaseException:
            os._exit(77)
    os.close(writing)
    return pid, reading


@ranks(2)
def test_a_forked_child_keeps_no_memory_of_the_ranks(group):
    array = group.allocate(_MIB)
    inner = group.subgroup([0, 1])
    assert len(regions_of(os.getpid())) >= 4
    started, waiting = os.pipe(), os.pipe()

    def stay():
        os.write(started[1], b"x")
        os.close(waiting[1])
        os.read(waiting[0], 1)

    child, errors = fork(stay)
    os.read(started[0], 1)
    assert regions_of(child) == []
    os.close(waiting[1])
    assert os.waitpid(child, 0)[1] == 0
    os.close(errors)
    array += 1
    inner.all_reduce(array)
    assert array[0] == 2


@ranks(2)
def test_a_forked_child_that_reads_an_array_of_the_region_dies_with_an_explanation(group):
    array = group.allocate(_MIB)
    child, errors = fork(lambda: np.sum(array))
    with os.fdopen(errors) as pipe:
        printed = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert printed.count("paceline: this forked child used memory that only its parent shares") == 1
    assert "gradient_as_bucket_view=True" in printed
    group.barrier()  # no rank takes the child's death for the rank's


@ranks(2, framework="torch")
def test_a_forked_child_that_reads_a_gradient_view_dies_with_an_explanation(group):
    import torch

    from paceline.torch import DistributedDataParallel

    model = torch.nn.Linear(4, 2)
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    wrapped(torch.ones(1, 4)).sum().backward()
    copy = model.weight.grad.clone()
    child, errors = fork(lambda: float(model.weight.grad.sum()))
    with os.fdopen(errors) as pipe:
        assert "Copy it before the fork" in pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    child, errors = fork(lambda: float(copy.sum()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(errors)
    group.barrier()
