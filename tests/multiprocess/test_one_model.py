"""`share_parameters=True`: one copy of the parameters for the ranks of a host."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import io
import os
import pickle
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline.torch
from paceline.collectives.whole_exchange import WholeExchange
from paceline.errors import (
    ConfigError,
    DeadlineError,
    ModelMismatchError,
    PeerLostError,
    RegionError,
    ReplicaError,
    ReplicasDifferError,
)
from tests.harness import kept_ranks, ranks, seccomp
from tests.several_hosts import be_on_host


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))


def wrap(group, module, **options):
    from paceline.torch import DistributedDataParallel

    return DistributedDataParallel(
        module, process_group=group, **{"share_parameters": True, "timeout_s": 60.0} | options
    )


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def values(module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def gather(group, value):
    """Gather a Python value of each rank, by rank. Collective."""
    return [pickle.loads(each) for each in WholeExchange(group._core).all_gather(pickle.dumps(value), 60.0)]


@kept_ranks(2)
def test_same_bits_as_unshared(group):
    shared, unshared = wrap(group, make_model(group.rank)), wrap(group, make_model(0), share_parameters=False)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (shared, unshared)]
    for step in range(4):
        for model, optimizer in zip((shared, unshared), optimizers):
            optimizer.zero_grad()
            model(batch_of(step, group.rank)).square().mean().backward()
            with model.writing():
                optimizer.step()
    assert all(map(torch.equal, values(shared), values(unshared)))
    assert not torch.equal(values(shared)[0], values(make_model(0))[0])
    shared.check_replicas()


@kept_ranks(2)
def test_stray_write_is_an_error_at_its_line_and_undone(group):
    ddp = wrap(group, make_model())
    before = values(ddp)
    weight = ddp.module[2].weight
    with pytest.raises(ConfigError, match=r"wrote to '2.weight'") as caught, torch.no_grad():
        weight.mul_(2)
    assert caught.value.parameter == "2.weight"
    assert all(map(torch.equal, values(ddp), before))
    with pytest.raises(RuntimeError, match=r"wrote to '0.weight'"):  # torch joins the copies' errors
        ddp.module.load_state_dict(make_model(1).state_dict())
    with pytest.raises(ConfigError, match=r"wrote to '0.bias'"):
        ddp.module[0].bias.data.zero_()
    assert all(map(torch.equal, values(ddp), before))


@ranks(2)
def test_stray_write_of_a_thread_is_reported_to_the_main_one(group):
    ddp = wrap(group, make_model())
    before = values(ddp)
    with pytest.raises(ConfigError, match=r"wrote to '0.weight'"):
        thread = threading.Thread(target=ddp.module[0].weight.data.zero_)
        thread.start()
        thread.join()
        ddp(batch_of(0, group.rank))  # reports it at the latest
    assert all(map(torch.equal, values(ddp), before))


@kept_ranks(2)
def test_plain_optimizer_is_refused_before_it_has_changed_anything(group):
    module = make_model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)  # made before wrapping
    ddp = wrap(group, module)
    ddp(batch_of(0, group.rank)).sum().backward()
    before = values(ddp)
    with pytest.raises(ConfigError, match=r"Adam.step: its parameters are shared by 2 ranks"):
        optimizer.step()
    assert not optimizer.state
    assert all(map(torch.equal, values(ddp), before))
    with ddp.writing():
        optimizer.step()  # it needs no rebuilding: the parameters it holds are the same objects, moved
    assert not torch.equal(values(ddp)[0], before[0])
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], ddp.parameters()))


@kept_ranks(2)
def test_there_is_one_copy(group):
    module = nn.Linear(1024, 1024)  # 4 MiB
    ddp = wrap(group, module)
    weight = ddp.module.weight
    files, _pss_kib = mapping_of(weight.data_ptr())
    assert len(set(gather(group, files))) == 1
    weight.sum()
    group.barrier()
    held = sum(gather(group, mapping_of(weight.data_ptr())[1]))
    assert 0 < held <= 4200, f"{held} KiB"
    group.barrier()


def mapping_of(address: int) -> tuple[str, int]:
    """Return the file mapped at an address, and its proportional size (Pss) in this process, in KiB."""
    current = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) (.*)", line):
            begin, end = int(match[1], 16), int(match[2], 16)
            current = line.split()[4] if begin <= address < end else ""
        elif current and line.startswith("Pss:"):
            return current, int(line.split()[1])
    raise AssertionError("nothing is mapped there")


@kept_ranks(2)
def test_writes_of_one_rank_of_the_host_count_for_all(group):
    ddp = wrap(group, make_model())
    before = values(ddp)
    with ddp.writing(), torch.no_grad():
        if group.rank == 1:
            ddp.module[0].weight.fill_(3)
        seen = ddp.module[0].weight.clone()
    assert torch.equal(seen, before[0]) == (group.rank == 0)  # other ranks' writes show only after it
    assert bool((ddp.module[0].weight == 3).all())
    assert torch.equal(ddp.module[2].weight, before[2])


@kept_ranks(2)
def test_writing_within_a_backward_is_refused(group):
    ddp = wrap(group, make_model())

    def write(_: torch.Tensor) -> None:
        with ddp.writing():
            ddp.module[0].bias.zero_()

    ddp.module[0].weight.register_hook(write)
    with pytest.raises(ConfigError, match="a backward is running"):
        ddp(batch_of(0, group.rank)).sum().backward()


@kept_ranks(2)
def test_backward_that_needs_the_old_values_is_refused_on_every_rank(group):
    ddp = wrap(group, make_model())
    loss = ddp(batch_of(0, group.rank)).sum()
    with ddp.writing(), torch.no_grad():
        if group.rank == 1:
            ddp.module[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@kept_ranks(2)
def test_every_rank_may_run_the_same_code(group):
    """As code for unshared parameters: each rank reads only its own writes, and each write counts once."""
    ddp = wrap(group, make_model())
    ema = [p.detach().clone() + 1 for p in ddp.parameters()]
    before = values(ddp)
    with ddp.writing(), torch.no_grad():
        for parameter, average in zip(ddp.parameters(), ema):
            held = parameter.clone()
            parameter.copy_(average)
            average.copy_(held)
    assert all(map(torch.equal, ema, before))
    assert all(torch.equal(p, q + 1) for p, q in zip(values(ddp), before))
    with ddp.writing(), torch.no_grad(), ddp.writing():
        ddp.module[0].bias.mul_(0.5)
    assert torch.equal(ddp.module[0].bias, 0.5 * (before[1] + 1))


@kept_ranks(2)
def test_different_writes_are_an_error_and_nothing_is_written(group):
    ddp = wrap(group, make_model())
    before = values(ddp)
    words = "have not written the same"
    with pytest.raises(ReplicasDifferError, match=words) as caught, ddp.writing(), torch.no_grad():
        ddp.module[2].bias.fill_(group.rank)
        ddp.module[0].bias.fill_(5)
    assert caught.value.differing == {"2.bias": (1,)}
    assert all(map(torch.equal, values(ddp), before))
    with ddp.writing(), torch.no_grad():
        ddp.module[2].bias.fill_(7)
    assert bool((ddp.module[2].bias == 7).all())


@kept_ranks(2)
def test_exception_on_one_rank_undoes_the_block_on_all(group):
    ddp = wrap(group, make_model())
    before = values(ddp)
    expected = ReplicaError if group.rank == 0 else ZeroDivisionError
    with pytest.raises(expected) as caught, ddp.writing(), torch.no_grad():
        ddp.module[0].weight.fill_(3)
        if group.rank == 1:
            raise ZeroDivisionError("no data")
    assert group.rank or (
        "Rank 1 raised in writing()" in str(caught.value) and "no data" in str(caught.value)
    )
    assert all(map(torch.equal, values(ddp), before))


@ranks(2)
def test_rank_that_skips_writing_is_named(group):
    ddp = wrap(group, make_model())
    before = values(ddp)
    group.barrier()
    if group.rank == 0:
        ddp._storage.copy._timeout_s = 0.5  # the only wait that is meant to reach its deadline
        with pytest.raises(DeadlineError, match="rank 1"), ddp.writing(), torch.no_grad():
            ddp.module[0].weight.fill_(3)
    else:
        wait_for(lambda: is_over(group))
    assert all(map(torch.equal, values(ddp), before))


def is_over(group) -> bool:
    try:
        group._core.check_usable()
    except Exception:
        return True
    return False


def wait_for(condition) -> None:
    """Poll for a condition that depends on another process."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@kept_ranks(2)
def test_state_dict_and_load_state_dict(group):
    ddp = wrap(group, make_model())
    saved = io.BytesIO()
    torch.save(ddp.state_dict(), saved)
    before = values(ddp)
    ddp.load_state_dict({f"module.{k}": v for k, v in make_model(1).state_dict().items()})
    assert all(map(torch.equal, values(ddp), values(make_model(1))))
    saved.seek(0)
    ddp.load_state_dict(torch.load(saved))
    assert all(map(torch.equal, values(ddp), before))
    with ddp.writing():
        ddp.module.load_state_dict(make_model(2).state_dict())
    assert all(map(torch.equal, values(ddp), values(make_model(2))))
    one = io.BytesIO()
    torch.save(ddp.module[2].bias, one)
    assert len(one.getvalue()) < 2500  # only its own bytes, not those of the whole model
    with pytest.raises(ConfigError, match="assign=True"):
        ddp.load_state_dict(make_model(1).state_dict(), assign=True)


@kept_ranks(2)
def test_copies_are_private(group):
    ddp = wrap(group, make_model())
    twin, module = copy.deepcopy(ddp), copy.deepcopy(ddp.module)
    pickled = pickle.loads(pickle.dumps(ddp))
    before = values(ddp)
    with torch.no_grad():
        for each in (twin, module, pickled):
            for parameter in each.parameters():
                parameter.add_(1)
    assert all(map(torch.equal, values(ddp), before))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module(batch_of(0, 0)).sum().backward()
    optimizer.step()
    twin(batch_of(0, group.rank)).sum().backward()  # collective: it shares its own parameters
    assert mapping_of(twin.module[0].weight.data_ptr())[0] != mapping_of(ddp.module[0].weight.data_ptr())[0]
    with pytest.raises(ConfigError, match="wrote to"), torch.no_grad():
        twin.module[0].weight.zero_()
    group.barrier()


@kept_ranks(2)
def test_moved_parameters_are_noticed(group):
    ddp = wrap(group, make_model())
    ddp.module.float()  # moves nothing
    ddp(batch_of(0, group.rank)).sum().backward()
    ddp.module[2].double()
    with pytest.raises(ConfigError, match="moved out of the shared memory") as caught:
        ddp(batch_of(0, group.rank))
    assert caught.value.parameter == "2.weight" and "2.bias" in str(caught.value)


@kept_ranks(2)
def test_parameters_of_all_kinds(group):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
            self.tied = nn.ParameterList([nn.Parameter(torch.randn(3, 3))])
            self.again = self.tied[0]
            self.frozen = nn.Parameter(torch.randn(7, dtype=torch.float64), requires_grad=False)
            self.whole = nn.Parameter(torch.arange(5), requires_grad=False)
            self.small = nn.Parameter(torch.randn(4, 3).to(torch.bfloat16).t())
            self.halves = nn.Parameter(torch.randn(3).half())
            self.turned = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.gaps = nn.Parameter(torch.randn(6, 6)[:, ::2])
            self.single = nn.Parameter(torch.tensor(2.0))

    model, reference = Model(), Model()
    ddp = wrap(group, model)
    assert model.again is model.tied[0]
    for (name, p), q in zip(ddp.module.named_parameters(), reference.parameters()):
        assert torch.equal(p, q), name
        assert (p.stride(), p.dtype, p.requires_grad) == (q.stride(), q.dtype, q.requires_grad), name
    with ddp.writing(), torch.no_grad():
        for p in ddp.parameters():
            p.add_(1)
    assert all(torch.equal(p, q + 1) for p, q in zip(ddp.parameters(), reference.parameters()))
    for p in ddp.parameters():
        if p.numel():
            with pytest.raises(ConfigError, match="wrote to"), torch.no_grad():
                p.zero_()


def overlapping() -> nn.Module:
    model = nn.Linear(4, 4)
    model.alias = nn.Parameter(model.weight.data[1:])
    return model


def expanded() -> nn.Module:
    model = nn.Linear(4, 4)
    model.wide = nn.Parameter(torch.ones(1).expand(5))
    return model


def normed() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4, max_norm=1.0))


REFUSED = {
    overlapping: "different parameters in the same memory",
    expanded: "several elements of 'wide' lie in the same memory",
    normed: "the embedding '0' has max_norm=1.0",
}


@kept_ranks(2)
def test_what_cannot_be_shared_is_refused_on_every_rank(group):
    for make, words in REFUSED.items():
        with pytest.raises(ConfigError, match=words):
            wrap(group, make())
    module = normed() if group.rank else nn.Sequential(nn.Embedding(5, 4))  # on one rank only
    with pytest.raises(ConfigError, match="rank 1: the embedding '0' has max_norm"):
        wrap(group, module)
    module = make_model(group.rank)
    wrap(group, module)(batch_of(0, group.rank)).sum().backward()  # the group still works


@kept_ranks(2)
def test_local_sgd_is_refused(group):
    with pytest.raises(ConfigError, match="local_sgd=LocalSGD") as caught:
        wrap(group, make_model(), local_sgd=paceline.torch.LocalSGD(every=4))
    assert "None with share_parameters=True" in caught.value.expected


@ranks(2)
def test_too_little_memory_is_reported_before_any_is_taken(group):
    from paceline.sharding import move_to_shared_memory

    true = move_to_shared_memory.lay_out
    move_to_shared_memory.lay_out = lambda sizes: (true(sizes)[0], 1 << 50)  # as if the model were as large
    with pytest.raises(RegionError) as caught:
        wrap(group, make_model())
    assert "are needed, and the machine or the container has" in str(caught.value)
    assert caught.value.ranks == (0,)


@pytest.mark.skipif(not seccomp.is_supported(), reason="numbers of system calls unknown")
@ranks(2)
def test_a_rank_that_cannot_reserve_its_memory_is_named(group):
    module = make_model()
    if group.rank == 1:
        seccomp.refuse("fallocate", errno.ENOSPC)
    with pytest.raises(RegionError, match=r"Rank 1 could not take the \d+ bytes of the model") as caught:
        wrap(group, module)
    assert caught.value.ranks == (1,)
    assert f"reserving shared memory: {os.strerror(errno.ENOSPC)}" in str(caught.value)


@ranks(2)
def test_forked_child_reads_and_cannot_write(group):
    ddp = wrap(group, make_model())
    before = values(ddp)

    def child() -> None:
        assert all(map(torch.equal, values(ddp), before))
        try:
            ddp.module[0].bias.data.zero_()
        except ConfigError:
            os._exit(0)

    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all(map(torch.equal, values(ddp), before))
    group.barrier()


@ranks(2)
def test_memory_is_freed_with_the_model(group):
    def mapped(file: str) -> int:
        return sum(line.split()[4] == file for line in Path("/proc/self/maps").read_text().splitlines())

    ddp = wrap(group, make_model())
    ddp(batch_of(0, group.rank)).sum().backward()
    held = ddp.module[2].weight.data
    address = held.data_ptr()
    file, _ = mapping_of(address)
    assert mapped(file) == 2
    del ddp
    gc.collect()
    assert held.data_ptr() == address and held.sum().isfinite()  # memory in use stays mapped
    del held
    gc.collect()
    assert mapped(file) == 0
    group.barrier()


@ranks(2, dies={1: signal.SIGKILL})
def test_a_survivor_can_save_the_parameters(group):
    ddp = wrap(group, make_model())
    before = values(ddp)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError), ddp.writing(), torch.no_grad():
        ddp.module[0].weight.fill_(3)
    assert all(map(torch.equal, values(ddp), before))
    torch.save(ddp.state_dict(), io.BytesIO())


class DiesWhilePublishing:
    """The memory of a rank that is killed after it has written the first page."""

    def __init__(self, memory) -> None:
        self._memory = memory

    def __getattr__(self, name):
        return getattr(self._memory, name)

    def publish(self, changes) -> None:
        begin, _ = changes[0]
        self._memory.publish([(begin, 4096)])
        os.kill(os.getpid(), signal.SIGKILL)


@ranks(2, dies={0: signal.SIGKILL})
def test_death_while_publishing_leaves_whole_values(group):
    ddp = wrap(group, nn.Linear(64, 64))
    if group.rank == 0:
        ddp._storage.copy.memory = DiesWhilePublishing(ddp._storage.copy.memory)
    with pytest.raises(PeerLostError), ddp.writing(), torch.no_grad():
        ddp.module.weight.fill_(3)
    assert bool((ddp.module.weight == 3).all())


def train(ddp, rank: int, optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(batch_of(2 * step, rank)).square().mean().backward()
        ddp(batch_of(2 * step + 1, rank)).square().mean().backward()
        with ddp.writing():
            optimizer.step()


OPTIONS = (
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"check_replicas_every": 1},
    {"init_sync": False},
    {"weight": 2.0},
    {"nonfinite": "raise"},
    {"bucket_cap_mb": 0.0001},
)


@kept_ranks(2)
def test_it_works_with_the_other_options(group):
    for options in OPTIONS:
        seed = 0 if "init_sync" in options else group.rank
        models = [wrap(group, make_model(seed), share_parameters=each, **options) for each in (True, False)]
        for ddp in models:
            train(ddp, group.rank, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
        assert all(map(torch.equal, *map(values, models))), options


@kept_ranks(2)
def test_values_that_differ_without_init_sync_are_refused(group):
    with pytest.raises(ReplicasDifferError, match=r"parameter '0.weight'"):
        wrap(group, make_model(group.rank), init_sync=False)


@kept_ranks(2)
def test_uneven_data(group):
    models = wrap(group, make_model()), wrap(group, make_model(), share_parameters=False)
    for ddp in models:
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)

        def step(ddp=ddp, optimizer=optimizer) -> None:
            with ddp.writing():
                optimizer.step()
            optimizer.zero_grad()

        for number in range(2 + group.rank):
            ddp(batch_of(number, group.rank)).square().mean().backward()
            step()
        ddp.finish(step)
    assert all(map(torch.equal, *map(values, models)))
    with pytest.raises(ConfigError, match="join: ranks that are out of data"):
        models[0].join()


@ranks(2, dies={0: ConfigError})
def test_finish_without_a_step_is_refused_if_other_ranks_would_wait_for_it(group):
    ddp = wrap(group, make_model())
    if group.rank == 0:
        ddp.finish()
    with pytest.raises(PeerLostError, match="would not take part in the steps"):
        ddp(batch_of(0, 1)).sum().backward()
        with ddp.writing(), torch.no_grad():
            ddp.module[0].bias.zero_()


@kept_ranks(2, group="gloo")
def test_over_a_process_group(rank):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    models = []
    for options in ({"reduce_through": "group"}, {}, {"share_parameters": False, "reduce_through": "group"}):
        ddp = wrap(None, make_model(rank), **options)
        if not options:
            ddp.register_comm_hook(None, allreduce_hook)
        train(ddp, rank, torch.optim.SGD(ddp.parameters(), lr=0.1))
        models.append(values(ddp))
    for mine in models[:2]:
        torch.testing.assert_close(mine, models[2])
    module = make_model()
    ddp = wrap(None, module)
    ddp._update_process_group(torch.distributed.new_group([0, 1]))
    train(ddp, rank, torch.optim.SGD(ddp.parameters(), lr=0.1))
    torch.testing.assert_close(values(ddp), models[2])
    with pytest.raises(ConfigError, match="wrote to"), torch.no_grad():
        module[0].weight.zero_()
    torch.distributed.barrier()


@kept_ranks(2, group="gloo")
def test_same_training_as_torchs_ddp(rank):
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    ours, theirs = wrap(None, make_model(0)), TorchDDP(make_model(0))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (ours, theirs)]
    for step in range(5):
        for model, optimizer in zip((ours, theirs), optimizers):
            optimizer.zero_grad()
            model(batch_of(step, rank)).square().mean().backward()
            with ours.writing() if model is ours else contextlib.nullcontext():
                optimizer.step()
    torch.testing.assert_close(values(ours), values(theirs))


@kept_ranks(2)
def test_mixed_precision_and_compiled_models(group):
    from torch.nn.parallel.distributed import _MixedPrecision

    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for change in (
        lambda m, share: wrap(group, m, share_parameters=share, mixed_precision=precision),
        lambda m, share: wrap(group, torch.compile(m, backend="eager"), share_parameters=share),
    ):
        models = [change(make_model(), share) for share in (True, False)]
        for ddp in models:
            train(ddp, group.rank, torch.optim.SGD(ddp.parameters(), lr=0.1), steps=2)
        assert all(map(torch.equal, *map(values, models)))


@kept_ranks(2)
def test_freezing_and_wrapping_again(group):
    module = make_model()
    first = wrap(group, module)
    module[0].weight.requires_grad_(False)
    train(first, group.rank, torch.optim.SGD(module.parameters(), lr=0.1), steps=1)
    module[0].weight.requires_grad_(True)
    second = wrap(group, module, share_parameters=False)  # each rank has its own again
    train(second, group.rank, torch.optim.SGD(module.parameters(), lr=0.1), steps=1)
    with pytest.raises(ConfigError, match="moved out"):
        first(batch_of(0, group.rank))
    second.check_replicas()


@kept_ranks(2)
def test_buffers_stay_each_ranks_own(group):
    ddp = wrap(group, nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    ddp(batch_of(0, group.rank)).square().mean().backward()
    mean = ddp.module[1].running_mean
    mean.fill_(group.rank)
    group.barrier()
    assert bool((mean == group.rank).all())


@kept_ranks(4, group="gloo")
def test_each_host_has_a_copy(rank):
    be_on_host(rank // 2)
    models = wrap(None, make_model(rank)), wrap(None, make_model(0), share_parameters=False)
    for ddp in models:
        train(ddp, rank, torch.optim.SGD(ddp.parameters(), lr=0.1))
    assert models[0].gradient_path == "hosts"
    assert all(map(torch.equal, *map(values, models)))
    files: list[str] = [""] * 4
    torch.distributed.all_gather_object(files, mapping_of(models[0].module[0].weight.data_ptr())[0])
    assert files[0] == files[1] != files[2] == files[3]
    before = values(models[0])
    words = "Some hosts have written within"
    with pytest.raises(ReplicasDifferError, match=words), models[0].writing(), torch.no_grad():
        if rank == 0:
            models[0].module[0].weight.fill_(3)
    assert all(map(torch.equal, values(models[0]), before))
    with models[0].writing(), torch.no_grad():
        if rank % 2:
            models[0].module[0].weight.fill_(3)
    assert bool((models[0].module[0].weight == 3).all())
    models[0].check_replicas()


@kept_ranks(2)
def test_share_for_inference(group):
    from paceline.torch import share

    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    torch.manual_seed(group.rank)
    for tensor in (*model.parameters(), model[1].running_mean):
        tensor.data.normal_()
    given = copy.deepcopy(model).eval()
    assert share(model, group) is model
    model.eval()
    by_rank = gather(group, model(batch_of(0, 0)).tolist())
    assert by_rank[0] == by_rank[1]
    if group.rank == 0:
        assert torch.equal(model(batch_of(0, 0)), given(batch_of(0, 0)))
    for address in (model[0].weight.data_ptr(), model[1].running_mean.data_ptr()):
        assert len(set(gather(group, mapping_of(address)[0]))) == 1
    with pytest.raises(ConfigError, match="model of share"):
        model[0].bias.data.zero_()
    with pytest.raises(ConfigError, match=r"wrote to '1.num_batches_tracked'"):
        model.train()(batch_of(1, 0))
    with pytest.raises(ConfigError, match="several processes share to read"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    copy.deepcopy(model).train()(batch_of(1, 0))
    with pytest.raises(ModelMismatchError):
        share(nn.Linear(2, 2 + group.rank), group)
    group.barrier()
