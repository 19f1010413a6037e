"""Writes docs/parity.md: what the two front ends' classes have in common, and what only one of them has.

python -m tests.multiprocess.parity
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path

import paddle
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.paddle import DataParallel as OursOfPaddle
from paceline.paddle.model.config import HARMLESS
from paceline.torch import DistributedDataParallel as OursOfTorch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"

INTRODUCTION = (
    "# What both front ends have\n\n"
    "This page compares the classes `paceline.torch.DistributedDataParallel` and "
    "`paceline.paddle.DataParallel`. It is made from them by `python -m tests.multiprocess.parity`, and a "
    "test compares it with them. A name without a remark belongs to the framework's own class, and exists "
    "for code that uses it.\n"
)

REMARKS: Mapping[str, str] = {
    # Arguments, attributes and methods that only one of the classes has.
    "layers": "`module` in torch",
    "comm_buffer_size": "another name of `bucket_cap_mb`, which torch has too",
    "last_comm_buffer_size": "1 MiB in torch; `bucket_cap_mb_list` sets it in both",
    "group": "another name of `process_group`, which torch has too",
    "module": "`layers` in Paddle",
    "strategy": "deprecated in Paddle",
    "init_reducer": "torch: wrap `ddp.module` again",
    "mixed_precision": "torch's attribute for code that uses it; an argument of both",
    "dim": "a batch is not split, because each process drives one device",
    "check_reduction": "without effect, as in torch",
    "batched_grad_copy": "changes no result",
    "lazy_bucket_allocation": "torch 2.15's; without effect",
    "require_manual_backward_finalization": "torch 2.15's",
    "should_finalize_after_backward": "torch 2.15's",
    "finalize_backward": "torch 2.15's",
    "_register_buffer_comm_hook": "`buffers=` and `sync_buffers()` in both",
    "_register_builtin_comm_hook": "torch's names for its own hooks",
    "_register_fused_optim": "optimizers of torch that step within backward",
    "_set_static_graph": "`static_graph=True` when wrapping",
    "_update_process_group": "for jobs that go on without lost ranks; in Paddle, wrap the model again over "
    "the other ranks",
    "join_hook": "torch's `Join` protocol; `join()` is in both",
    "join_device": "torch's `Join` protocol",
    "join_process_group": "torch's `Join` protocol",
    "_set_params_and_buffers_to_ignore_for_model": "`parameter.no_sync = True` in Paddle",
    "_get_ddp_logging_data": "torch's logger; `gradient_path` and `waited_s` are in both",
    "parameters_to_ignore": "`parameter.no_sync = True` in Paddle",
}

BEYOND = """
## Beyond the classes

| what | torch | Paddle |
|---|:-:|:-:|
| subclass of the framework's class | yes | yes |
| models that share parameters, and models that are wrapped again | yes | yes |
| sparse gradients | yes | on the CPU |
| one model per host for inference, `share()` | yes | yes |
| `ShardedOptimizer`, and its journal, with which a step survives a lost rank | yes | yes |
| communication hooks, compressed gradients | torch's hooks, and ours | ours |
| SyncBatchNorm | yes | yes |
| the wrapper can be compiled, pickled and copied | yes | no, as with Paddle's class |
| a parameter that no rank uses | an error | a warning, as in Paddle |
| buffers that ranks set to different values between steps | an error | a warning, as Paddle keeps them |
| a step with gradients of `autograd.grad()`, which are not averaged | a warning | not reported |
| a backend of the framework's collectives, and `DataParallel` in one process | yes | no, Paddle has neither |
"""


def arguments(kind: type) -> set[str]:
    names = {
        name for name, p in inspect.signature(kind.__init__).parameters.items() if p.kind != p.VAR_KEYWORD
    }  # type: ignore[misc]
    return names - {"self"}


def names(kind: type, base: type) -> set[str]:
    """Public names of the class, and attributes of its instances that `base` lacks.

    Names that the class hides, so that access to them fails, are left out.
    """
    of_instances = set(re.findall(r"self\.([a-z]\w*)\b[^=\n]*= ", inspect.getsource(kind)))
    return {
        name for name in dir(kind) if not name.startswith("_") and hasattr(kind, name)
    } | of_instances - set(dir(base))


def half_private(kind: type, framework: type, base: type) -> set[str]:
    """Methods with one leading underscore that the framework's class has and ours replaces."""
    return {
        name
        for name in vars(framework)
        if name.startswith("_")
        and not name.startswith("__")
        and not hasattr(base, name)
        and inspect.isroutine(getattr(kind, name, None))
        and getattr(kind, name) is not getattr(framework, name)
    }


def remark(name: str) -> str:
    of_framework = names(TorchDDP, torch.nn.Module) | names(paddle.DataParallel, paddle.nn.Layer)
    if name not in REMARKS and name not in of_framework | set(vars(TorchDDP)):
        raise KeyError(f"only one class has '{name}': say why, or what the other has instead, in REMARKS")
    return REMARKS.get(name, "")


def table(kind: str, in_torch: set[str], in_paddle: set[str]) -> str:
    both, one = sorted(in_torch & in_paddle), sorted(in_torch ^ in_paddle)
    text = f"\n## {kind}\n"
    if both:
        text += f"\nIn both: {', '.join(f'`{name}`' for name in both)}.\n"
    if one:
        text += "\n| in one | torch | Paddle | remark |\n|---|:-:|:-:|---|\n"
    for name in one:
        marks = ("yes" if name in names_ else "-" for names_ in (in_torch, in_paddle))
        text += f"| `{name}` | {' | '.join(marks)} | {remark(name)} |\n"
    return text


def page() -> str:
    text = INTRODUCTION + table("Arguments", arguments(OursOfTorch), arguments(OursOfPaddle))
    text += "\nOf these, Paddle's class takes only the values that are listed:\n\n"
    text += "| argument | values | why |\n|---|---|---|\n"
    for name, values in sorted(HARMLESS.items()):
        spelled = ", ".join(f"`{value}`" for value in values)
        text += f"| `{name}` | {spelled} | {REMARKS[name]} |\n"
    text += table(
        "Attributes and methods",
        names(OursOfTorch, torch.nn.Module) - set(dir(torch.nn.Module)),
        names(OursOfPaddle, paddle.nn.Layer) - set(dir(paddle.nn.Layer)),
    )
    return (
        text
        + table(
            "Half-private names",
            half_private(OursOfTorch, TorchDDP, torch.nn.Module),
            half_private(OursOfPaddle, paddle.DataParallel, paddle.nn.Layer),
        )
        + BEYOND
    )


if __name__ == "__main__":
    PAGE.write_text(page())
