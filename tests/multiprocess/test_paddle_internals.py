"""Each private call of Paddle (internals.py) does what Paceline relies on; a test fails if it changes."""

from __future__ import annotations

import ast
import gc
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.testing import assert_array_equal
from paddle import nn
from paddle.base.unique_name import UniqueNameGenerator
from paddle.utils import unique_name

from paceline import versions as framework_versions
from paceline.errors import ConfigError
from paceline.health.connections import connected_sockets, copy_of
from paceline.paddle import internals, versions
from paceline.paddle.backward import graphs
from paceline.paddle.ops import OPS
from paceline.reducer.plan import ParameterSpec, plan_buckets
from tests.multiprocess.paddle_models import drop_grad, keeps_empty_gradients, kept_ranks, ranks


@kept_ranks(1, group=None)
def test_a_hook_fires_once_after_accumulation(rank: int) -> None:
    layer, seen = nn.Linear(2, 2), []
    internals.on_gradient(layer.weight, lambda: seen.append(internals.gradient_of(layer.weight).sum().item()))
    x = layer(paddle.ones([1, 2]))
    layer(x).sum().backward()
    assert len(seen) == 1 and seen[0] == layer.weight.grad.sum().item()
    paddle.grad(layer(paddle.ones([1, 2])).sum(), [layer.weight])
    assert len(seen) == 1


@kept_ranks(1, group=None)
def test_a_function_that_was_never_applied_is_in_no_graph(rank: int) -> None:
    class Doubled(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            return gradient * 2

    assert not internals.may_be_in_a_graph(Doubled)
    x = paddle.ones([2])
    x.stop_gradient = False
    output = Doubled.apply(x)
    assert internals.may_be_in_a_graph(Doubled)
    output.sum().backward()


@kept_ranks(1, group=None)
def test_a_gradient_is_the_memory_itself_and_moves_into_other_memory(rank: int) -> None:
    layer = nn.Linear(2, 2)
    assert internals.gradient_of(layer.weight) is None
    find = internals.find_gradient(layer.weight)
    layer(paddle.ones([1, 2])).sum().backward()
    gradient = internals.gradient_of(layer.weight)
    assert gradient.data_ptr() == layer.weight.grad.data_ptr() == find().data_ptr()
    place = paddle.full([2, 2], 5.0)
    internals.set_gradient(layer.weight, place)
    assert internals.gradient_of(layer.weight).data_ptr() == place.data_ptr() == find().data_ptr()
    assert_array_equal(gradient.numpy(), np.ones((2, 2)))  # a holder of the old memory keeps its values
    layer(paddle.ones([1, 2])).sum().backward()  # accumulates there
    assert_array_equal(place.numpy(), np.full((2, 2), 6.0))
    drop_grad(layer.weight)
    assert_array_equal(place.numpy(), np.full((2, 2), 6.0))


@keeps_empty_gradients
@kept_ranks(1, group=None)
def test_a_gradient_without_elements(rank: int) -> None:
    nothing = paddle.create_parameter([0, 2], "float32")
    internals.set_gradient(nothing, paddle.zeros([0, 2]))
    assert nothing.grad.shape == [0, 2]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "bfloat16", "float32", "int64", "float64", "complex128"])
@kept_ranks(1, group=None)
def test_bytes_are_seen_as_any_dtype(rank: int, dtype: str) -> None:
    wanted = paddle.ones([3]).cast(dtype)
    array = np.array(paddle.view(wanted, "uint8").numpy())
    found = internals.over(array, wanted.dtype)
    assert found.dtype == wanted.dtype and list(found.shape) == [3]
    assert found.data_ptr() == array.ctypes.data
    copied = internals.from_bytes(paddle.view(wanted, "uint8"), wanted.dtype)
    assert copied.data_ptr() != wanted.data_ptr()
    for each in (found, copied):
        assert_array_equal(each.cast("float32").numpy(), np.ones(3))
    array[:] = 0
    assert_array_equal(found.cast("float32").numpy(), np.zeros(3))


@kept_ranks(1, group=None)
def test_places_are_compared(rank: int) -> None:
    one, other = paddle.ones([1]).place, paddle.ones([2]).place
    assert internals.same_place(one, other)
    assert not internals.same_place("Place(gpu:0)", "Place(gpu:1)")  # real places differ only with GPUs


@ranks(1, group=None)
def test_paddle_reads_its_rank_again(rank: int) -> None:
    assert dist.get_world_size() == 1
    os.environ |= {"PADDLE_TRAINER_ID": "3", "PADDLE_TRAINERS_NUM": "5"}
    internals.read_rank_anew()
    assert (dist.get_rank(), dist.get_world_size()) == (3, 5)


@pytest.mark.parametrize("uses_multi_tensor", [False, True])
@kept_ranks(1, group=None)
def test_updates_of_an_optimizer_are_noted(rank: int, uses_multi_tensor: bool) -> None:
    layer = nn.Linear(2, 2)
    optimizer = paddle.optimizer.Adam(parameters=layer.parameters(), use_multi_tensor=uses_multi_tensor)
    noted: list[int] = []
    internals.note_updates(optimizer, lambda: noted.append(1))
    for steps in (1, 2):
        before = layer.weight.numpy()
        layer(paddle.ones([1, 2])).sum().backward()
        optimizer.step()
        assert noted and len(noted) % steps == 0
        assert not np.array_equal(layer.weight.numpy(), before)


@kept_ranks(1, group=None)
def test_reading_a_node_does_not_keep_the_graph_alive(rank: int) -> None:
    class Hook:
        def __call__(self, gradient: paddle.Tensor) -> None: ...

    def graph_with(hook: Hook) -> None:
        x = paddle.ones([2])
        x.stop_gradient = False
        y = x * 2
        y.register_hook(hook)
        nodes = [internals.grad_node(y), internals.grad_node(y), internals.grad_node(y.sum())]
        assert nodes[0] is nodes[1] and nodes[2].next_functions[0] is nodes[0]

    hook = Hook()
    graph_with(hook)
    alive = weakref.ref(hook)
    del hook
    gc.collect()
    assert alive() is None


@kept_ranks(1, group=None)
def test_tensors_that_were_never_given_values(rank: int) -> None:
    recurrent = nn.GRU(2, 2)
    has_memory = {name: internals.has_memory(each) for name, each in recurrent.named_buffers()}
    assert has_memory == {"_dropout_state": False}
    assert all(map(internals.has_memory, [*recurrent.parameters(), paddle.ones([]), paddle.zeros([0, 2])]))


class Doubled(paddle.autograd.PyLayer):
    """The sum of two tensors, whose backward returns one tensor for both."""

    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, dy):
        return dy, dy


@kept_ranks(1, group=None)
def test_two_parameters_may_have_one_gradient_until_one_is_set(rank: int) -> None:
    a, b = (paddle.create_parameter([2], "float32") for _ in range(2))
    Doubled.apply(a, b).sum().backward()
    assert internals.gradient_of(a).data_ptr() == internals.gradient_of(b).data_ptr()
    internals.set_gradient(b, paddle.full([2], 7.0))
    assert_array_equal(a.grad.numpy(), [1, 1])
    assert_array_equal(b.grad.numpy(), [7, 7])


@kept_ranks(1, group=None)
def test_hooks_of_user_code_are_noted_and_called_in_order(rank: int) -> None:
    a, noted, called = paddle.create_parameter([2], "float32"), [], []
    internals.watch_hooks_of_others(noted.append)
    internals.on_gradient(a, lambda: called.append("ours"))
    assert not noted
    a._register_backward_hook(lambda: called.append("theirs"))
    assert len(noted) == 1 and noted[0] is a
    a.sum().backward()
    assert called == ["ours", "theirs"]


@kept_ranks(1, group=None)
def test_an_assigned_gradient_counts_after_clearing_only_on_request(rank: int) -> None:
    for counts in (True, False):
        a = paddle.create_parameter([2], "float32")
        a.sum().backward()
        a.clear_grad()
        a.grad = paddle.full([2], 5.0)
        if counts:
            internals.count_as_gradient(a)
        a.sum().backward()
        assert_array_equal(a.grad.numpy(), [6, 6] if counts else [1, 1])


@kept_ranks(1, group=None)
def test_a_cleared_gradient_counts_again_on_request(rank: int) -> None:
    layer = nn.Linear(2, 2)
    for counts in (True, False):
        layer(paddle.ones([1, 2])).sum().backward()
        layer.weight.clear_grad()
        if counts:
            internals.count_as_gradient(layer.weight)
        before = internals.gradient_of(layer.weight).data_ptr()
        internals.gradient_of(layer.weight).detach().fill_(3.0)
        layer(paddle.ones([1, 2])).sum().backward()
        if counts:
            assert internals.gradient_of(layer.weight).data_ptr() == before
            assert_array_equal(layer.weight.grad.numpy(), np.full((2, 2), 4.0))
        else:
            assert_array_equal(layer.weight.grad.numpy(), np.full((2, 2), 1.0))


@kept_ranks(1, group=None)
def test_sparse_rows_are_read_and_replaced(rank: int) -> None:
    table = nn.Embedding(6, 2, sparse=True)
    table(paddle.to_tensor([1, 3, 1])).sum().backward()
    gradient = internals.gradient_of(table.weight)
    assert internals.is_sparse(gradient) and not internals.is_sparse(table.weight)
    rows, values = internals.rows_of(gradient)
    assert rows == [1, 3, 1]
    assert_array_equal(values, np.ones((3, 2)))
    internals.scale_rows(gradient, 0.5)
    assert_array_equal(internals.rows_of(gradient)[1], np.full((3, 2), 0.5))
    other = nn.Embedding(6, 2, sparse=True)
    internals.set_rows(gradient, [0, 5], np.full((2, 2), 7, np.float32))
    internals.give_rows(other.weight, [0, 5], np.full((2, 2), 7, np.float32))
    for weight in (table.weight, other.weight):
        before = weight.numpy()
        paddle.optimizer.SGD(1.0, parameters=[weight]).step()
        assert_array_equal((before - weight.numpy()).round(4)[:, 0], [7, 0, 0, 0, 0, 7])


@kept_ranks(1, group=None)
def test_every_backward_goes_through_one_function_and_grad_does_not(rank: int) -> None:
    graphs.watch_backwards()
    layer, depths = nn.Linear(2, 2), []
    out = layer(paddle.ones([1, 2]))
    internals.on_gradient(layer.weight, lambda: depths.append(graphs.calls.depth))
    out.sum().backward(retain_graph=True)
    paddle.autograd.backward([out.sum()], retain_graph=True)
    x = paddle.ones([1, 2])
    x.stop_gradient = False
    out = layer(x)
    out.register_hook(lambda gradient: depths.append(graphs.calls.depth))
    paddle.grad(out.sum(), [x])
    assert depths == [1, 1, 0], depths
    assert graphs.calls.depth == 0


@kept_ranks(1, group=None)
def test_an_error_at_the_end_of_backward_reaches_the_user_as_it_is(rank: int) -> None:
    def fail() -> None:
        raise KeyError("as it is")

    graphs.watch_backwards()
    layer, ended = nn.Linear(2, 2), []
    armed = [fail, lambda: ended.append(True)]
    internals.on_gradient(layer.bias, lambda: [graphs.at_end(end) for end in armed])
    with pytest.raises(KeyError, match="as it is"):
        layer(paddle.ones([1, 2])).sum().backward()
    assert ended  # the other model's backward still ended


def test_private_state_of_layers() -> None:
    norm, embedding = nn.BatchNorm2D(3, momentum=0.7, epsilon=0.1, data_format="NHWC"), nn.Embedding(4, 2)
    parameters, sublayers = internals.slots_of(nn.Sequential(norm))
    assert list(sublayers.values()) == [norm] and not parameters
    assert set(internals.slots_of(norm)[0]) == {"weight", "bias", "_mean", "_variance"}
    assert internals.makes_sparse_gradients(nn.Embedding(4, 2, sparse=True))
    assert not internals.makes_sparse_gradients(embedding)
    mean, variance = internals.running_statistics_of(norm)
    assert_array_equal(mean.numpy(), np.zeros(3))
    assert_array_equal(variance.numpy(), np.ones(3))
    assert internals.running_statistics_of(embedding) is None
    settings = internals.norm_settings_of(norm)
    assert (settings.num_features, settings.momentum, settings.epsilon) == (3, 0.7, 0.1)
    assert (settings.weight_attr, settings.bias_attr, settings.use_global_stats) == (None, None, None)
    assert settings.data_format == "NHWC"
    internals.use_global_stats(norm, True)
    internals.set_running_statistics(norm, variance, mean)
    assert internals.norm_settings_of(norm).use_global_stats
    assert internals.running_statistics_of(norm)[0] is variance


def test_private_names_are_touched_in_one_file() -> None:
    folder = Path(internals.__file__).parent
    wrong = []
    for path in sorted(folder.rglob("*.py")):
        if path.name == "internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_private = isinstance(node, ast.Attribute) and node.attr[:1] == "_" and node.attr[:2] != "__"
            is_ours = is_private and (
                ast.unparse(node.value) in ("self", "cls", "super()") or node.attr == "_core"  # a Group's
            )
            if is_private and not is_ours:
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paddle.base"):
                wrong.append(f"{path.name}:{node.lineno}: {node.module}")
    assert not wrong, "\n".join(wrong)


@kept_ranks(1, group=None)
def test_places_are_views_of_one_memory(rank: int) -> None:
    import ctypes

    model = [paddle.zeros([2, 3]), paddle.zeros([5], "bfloat16"), paddle.zeros([4], "float64")]
    specs = [
        ParameterSpec(str(n), p.size, str(p.dtype).split(".")[1], p.element_size(), "cpu")
        for n, p in enumerate(model)
    ]
    plan = plan_buckets(specs, bucket_cap_bytes=1 << 20, first_bucket_bytes=1 << 20)
    memory = ctypes.create_string_buffer(plan.buffer_bytes + 64)
    views = OPS.places_at(plan, model, ctypes.addressof(memory), memory)
    for view, like, offset in zip(views, model, plan.offsets):
        assert (view.shape, view.dtype) == (like.shape, like.dtype)
        assert view.data_ptr() == ctypes.addressof(memory) + offset
        view.fill_(1.0)
    assert sum(float(view.astype("float64").sum()) for view in views) == 15


def test_importing_the_front_end_imports_no_torch() -> None:
    code = "import paceline.paddle, sys; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("", "not installed"),
        ("2.6.2", "does not support PaddlePaddle 2.6.2"),
        ("3.4.0", "3.4.0"),
        ("3.0.0", ""),
        ("3.1.1", ""),
        ("3.3.2", ""),
    ],
)
def test_the_version_is_checked(version: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework_versions, "installed", lambda _: version)
    if message:
        with pytest.raises(ImportError, match=message):
            versions.check()
    else:
        versions.check()


def test_the_installed_version_is_found() -> None:
    assert framework_versions.installed(["nothing", "paddlepaddle"]) == importlib.metadata.version(
        "paddlepaddle"
    )


@kept_ranks(1, group=None)
def test_parameters_are_found_where_a_layer_keeps_them(rank: int) -> None:
    layer = nn.Linear(2, 2)
    slots, weight = internals.parameters_of(layer), layer.weight
    slots["weight"] = weight.cast("float64")
    slots["bias"] = layer.bias.cast("float64")
    layer(paddle.ones([1, 2], "float64")).sum().backward()
    assert layer.weight is not weight and weight.grad.dtype == paddle.float32
    assert_array_equal(weight.grad.numpy(), np.ones((2, 2)))


@kept_ranks(1, group=None)
def test_a_converted_tensor_stays_the_same_object(rank: int) -> None:
    layer = nn.BatchNorm1D(2)
    mean = layer._mean
    layer.register_buffer("halves", paddle.full([3], 0.5))
    for tensor in (mean, layer.halves):
        before = tensor.numpy()
        internals.convert(tensor, paddle.float64)
        assert tensor.dtype == paddle.float64
        assert_array_equal(tensor.numpy(), before)
    assert layer._mean is mean and layer.state_dict()["_mean"].dtype == paddle.float64


@ranks(2, group=None)
def test_a_pair_moves_arrays_in_one_direction(rank: int) -> None:
    """As docs/design/hosts.md says of Paddle's Gloo: shorter arrays fit, and calls pair up by their order."""
    os.environ |= {"PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": "2"}
    port = Path(os.environ["TMPDIR"]) / "port"
    if rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            number = free.getsockname()[1]
        port.with_suffix(".new").write_text(str(number))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        number = int(port.read_text())
        while not _listens(number):
            time.sleep(0.01)
    move = internals.make_pair(1 << 30, "127.0.0.1", number, keeps_store=rank == 0, receives=rank == 1)
    room = np.zeros(100, np.uint8)
    if rank == 0:
        move(np.full(100, 7, np.uint8))
        move(np.full(64, 8, np.uint8))
        with pytest.raises(RuntimeError, match="TIMEOUT"):  # rank 1 has closed the connection
            move(room)
    else:
        move(room)
        assert_array_equal(room, np.full(100, 7))
        move(room)
        assert_array_equal(room, [8] * 64 + [7] * 36)
        for ends, connection in connected_sockets().items():
            if (each := copy_of(connection, ends)) is not None:  # Paddle closes some connections itself
                with each:
                    each.shutdown(socket.SHUT_RDWR)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_wrapped_classes_include_those_that_make_steps_and_batches():
    optimizer = paddle.optimizer.AdamW(parameters=paddle.nn.Linear(2, 2).parameters())
    assert type(optimizer) in internals.classes_with("step", internals.optimizers())
    assert paddle.optimizer.Optimizer in internals.classes_with("step", internals.optimizers())
    loader = paddle.io.DataLoader([1, 2], batch_size=1)
    assert type(iter(loader)) in internals.classes_with("__next__", internals.loader_iterators())


def test_a_parameter_in_the_memory_of_another_is_updated_in_place() -> None:
    whole = paddle.arange(10, dtype="float32")
    part = internals.make_parameter(whole[4:7], "some_name")
    assert part.name == "some_name" and part.shape == [3] and not part.stop_gradient
    gradients = paddle.ones([10])
    internals.lend_gradient(part, gradients[4:7])
    assert internals.gradient_of(part).data_ptr() == gradients.data_ptr() + 16
    paddle.optimizer.SGD(1.0, [part]).step()
    assert whole.tolist() == [0, 1, 2, 3, 3, 4, 5, 7, 8, 9]
    internals.end_loan(part)
    assert internals.gradient_of(part) is None and gradients.tolist() == [1] * 10

    other = paddle.zeros([10])
    internals.lay_into(part, other[1:4])
    internals.lend_gradient(part, gradients[:3])
    paddle.optimizer.SGD(1.0, [part]).step()
    assert other.tolist() == [0, -1, -1, -1, 0, 0, 0, 0, 0, 0]
    assert not internals.has_main_gradient(part)


def test_private_state_of_optimizers() -> None:
    with paddle.utils.unique_name.guard():
        layers = [nn.Linear(2, 3), nn.Linear(3, 1)]
    clip = nn.ClipGradByValue(0.25)
    plain = paddle.optimizer.Adam(0.1, parameters=layers[0].parameters(), grad_clip=clip)
    assert not internals.has_groups(plain) and internals.clips_gradients(plain)
    (group,) = internals.groups_of(plain)
    assert [parameter.name for parameter in group["params"]] == ["linear_0.w_0", "linear_0.b_0"]
    pairs = [(layers[0].bias, paddle.full([3], 2.0))]
    assert internals.clip_gradients(plain, group, pairs)[0][1].tolist() == [0.25] * 3
    assert internals.scheduler_of(plain) is None

    schedule = paddle.optimizer.lr.StepDecay(0.1, 2)
    entries = [{"params": layer.parameters(), "weight_decay": 0.5 * n} for n, layer in enumerate(layers)]
    entries[1]["grad_clip"] = clip
    grouped = paddle.optimizer.AdamW(schedule, parameters=entries)
    assert internals.has_groups(grouped) and internals.clips_gradients(grouped)
    assert internals.scheduler_of(grouped) is schedule
    first, second = internals.groups_of(grouped)
    assert (first["weight_decay"], second["weight_decay"]) == (0.0, 0.5)
    assert internals.clip_gradients(grouped, first, pairs)[0][1].tolist() == [2.0] * 3
    assert internals.clip_gradients(grouped, second, pairs)[0][1].tolist() == [0.25] * 3

    assert list(internals.state_of(grouped)) == []
    internals.make_state(grouped, second, [layers[1].weight])
    found = {(owner, kind): value.shape for owner, kind, value in internals.state_of(grouped)}
    assert found[("linear_1.w_0", "moment1")] == [3, 1] and {owner for owner, _ in found} == {"linear_1.w_0"}
    assert internals.state_of_one(grouped, "linear_1.w_0").keys() == {kind for _, kind in found}
    assert internals.state_of_one(grouped, "linear_0.w_0") == {}
    internals.convert(layers[0].weight, "bfloat16")
    wide = paddle.optimizer.SGD(0.1, parameters=[layers[0].weight], multi_precision=True)
    internals.make_state(wide, internals.groups_of(wide)[0], [layers[0].weight])
    (master,) = internals.master_weights_of(wide).values()
    assert master.dtype == paddle.float32 and master.name.startswith("linear_0.w_0_fp32_master_")
    internals.share_notes(wide, plain)
    plain._set_auxiliary_var("found_inf", True)
    assert wide._get_auxiliary_var("found_inf")
    internals.take_precision(wide, grouped)
    assert wide._dtype == paddle.float32


def test_a_tensor_that_was_detached_follows_its_parameter() -> None:
    """So a result of detach() may not be moved to other memory: its parameter would move too."""
    parameter, other = paddle.zeros([4]), paddle.ones([4])
    detached = parameter.detach()
    internals.lay_into(detached, other)
    assert parameter.data_ptr() == other.data_ptr()


def test_writes_are_counted_for_autograd() -> None:
    weight = paddle.ones([3])
    weight.stop_gradient = False
    loss = (weight * weight).sum()
    internals.count_writes([weight])
    with pytest.raises(Exception, match=r"(?i)inplace"):
        loss.backward()


def test_each_step_is_checked_before_it_changes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = paddle.optimizer.Optimizer
    monkeypatch.setattr(kind, "_apply_optimize", kind._apply_optimize)  # so that the test restores it
    seen = []

    def check(optimizer: object) -> None:
        seen.append(optimizer)
        raise ConfigError("no")

    internals.watch_steps(check)
    for optimizer_class in (paddle.optimizer.SGD, paddle.optimizer.AdamW, paddle.optimizer.Lamb):
        layer = nn.Linear(2, 1)
        layer(paddle.ones([1, 2])).sum().backward()
        before = layer.weight.numpy()
        for entries in (layer.parameters(), [{"params": layer.parameters()}]):
            optimizer = optimizer_class(0.1, parameters=entries)
            with pytest.raises(ConfigError):
                optimizer.step()
            assert seen[-1] is optimizer and not optimizer.state_dict()
        with pytest.raises(ConfigError):
            optimizer_class(0.1, parameters=layer.parameters()).minimize(layer.weight.sum())
        assert (layer.weight.numpy() == before).all()
    assert internals.has_max_norm(nn.Embedding(3, 2, max_norm=1.0))
    assert not internals.has_max_norm(nn.Embedding(3, 2))


@ranks(1, group=None)
def test_sot_translates_no_function_of_a_folder_that_it_skips(rank: int) -> None:
    """Paceline's folder is skipped: its hooks run untranslated if a backward within to_static calls them."""
    seen: list[str] = []
    code = "def hook(gradient):\n    seen.append(sys._getframe().f_code.co_name)\n"
    hooks = {}
    for folder in ("/skipped/", "/other/"):
        names = {"seen": seen, "sys": sys}
        exec(compile(code, folder + "hooks.py", "exec"), names)
        hooks[folder] = names["hook"]
    internals.skip_in_sot("/skipped/")

    def step(x: paddle.Tensor, hook: object) -> None:
        y = x * 2
        y.register_hook(hook)
        y.sum().backward()

    for folder, is_translated in (("/skipped/", False), ("/other/", True)):
        seen.clear()
        x = paddle.ones([2])
        x.stop_gradient = False
        paddle.jit.to_static(step, full_graph=False)(x, hooks[folder])
        assert (seen != ["hook"]) == is_translated, seen


@ranks(1, group=None)
def test_functions_called_by_an_untranslated_function_run_untranslated(rank: int) -> None:
    """Both if SOT simulates its call and if Paddle's C++ makes it."""
    seen: list[str] = []

    def note(gradient: object) -> None:
        seen.append(sys._getframe().f_code.co_name)

    @internals.untranslated
    def call(gradient: object) -> None:
        note(gradient)

    def step(x: paddle.Tensor) -> None:
        y = x * 2
        y.register_hook(call)
        call(None)
        y.sum().backward()

    x = paddle.ones([2])
    x.stop_gradient = False
    paddle.jit.to_static(step, full_graph=False)(x)
    assert seen == ["note", "note"]


@kept_ranks(1, group=None)
def test_tensors_in_the_memory_of_a_gradient_are_counted(rank: int) -> None:
    paddle.set_default_dtype("float64")
    uses = internals.uses_of_memory()
    paddle.set_default_dtype("float32")
    assert uses is not None
    layer, kept = nn.Linear(2, 3), []
    parameter = layer.weight
    assert uses.of_gradient(parameter) == 0
    for number in range(3):
        layer(paddle.ones([1, 2])).sum().backward()
        gradient = internals.gradient_of(parameter)
        memory, count = uses.of(gradient)
        assert memory == uses.of_gradient(parameter) != 0 and count == 1
        kept += [gradient.detach(), paddle.view(gradient, [6]), gradient[1]]
        assert uses.of(gradient) == (memory, 4) and uses.of(kept[-1])[0] == memory
        kept.clear()
        assert uses.of(gradient) == (memory, 1)
        del gradient
        parameter.clear_gradient(set_to_zero=number == 0)
    dense, sparse = paddle.zeros([2]), nn.Embedding(3, 2, sparse=True)
    assert uses.of(dense)[0] not in (0, uses.of(paddle.ones([2]))[0])
    sparse(paddle.to_tensor([1])).sum().backward()
    assert uses.of(internals.gradient_of(sparse.weight)) == (0, 0) == (uses.of_gradient(sparse.weight), 0)
    assert uses.of(paddle.zeros([0, 2])) is not None and uses.of(3) == (0, 0)


@kept_ranks(1, group=None)
def test_generators_continue_from_states_in_json(rank: int) -> None:
    paddle.seed(3)
    paddle.rand([5])
    states = json.loads(json.dumps(internals.generator_states("cpu")))
    drawn = [paddle.rand([3]).numpy(), paddle.nn.functional.dropout(paddle.ones([50])).numpy()]
    paddle.seed(4)
    internals.set_generator_states("cpu", states)
    assert_array_equal(paddle.rand([3]).numpy(), drawn[0])
    assert_array_equal(paddle.nn.functional.dropout(paddle.ones([50])).numpy(), drawn[1])


@kept_ranks(1, group=None)
def test_loaded_state_that_an_optimizer_has_not_used_is_found(rank: int) -> None:
    layer, states = nn.Linear(2, 2), [{}]
    for _ in range(2):
        optimizer = paddle.optimizer.Adam(parameters=layer.parameters())
        optimizer.set_state_dict(states[-1])
        layer(paddle.ones([1, 2])).sum().backward()
        with unique_name.guard(UniqueNameGenerator()):  # as in a new process
            optimizer.step()
        states.append(optimizer.state_dict())
        layer.clear_gradients()
        layer.bias.stop_gradient = True
    unused = internals.loaded_and_unused(optimizer)
    assert unused and unused.keys() == states[1].keys() - states[2].keys()
    assert internals.loaded_and_unused(layer) == {}
