"""The torch side of the fuzzer: the names that the files without a framework use."""

from __future__ import annotations

# Modules that would otherwise be imported in every fork; the first takes a second, in the first forward of
# torch's DDP.
import torch._dynamo
import torch.profiler._cupti_monitor  # noqa: F401

from tests.differential.programs import Program, is_weighted, numbered
from tests.differential.records import Lost
from tests.differential.torch_corpus import CORPUS, OPEN
from tests.differential.torch_differences import incumbents_of, known_difference
from tests.differential.torch_grammar import generate, modes_of
from tests.differential.torch_mutations import MUTATIONS
from tests.differential.torch_reference import make_reference
from tests.differential.torch_refusals import expected_refusal
from tests.differential.torch_subjects import MODES, TORCH, TORCHS, make_rank
from tests.differential.walk import Parting

INCUMBENT = TORCH
"""The mode in which the framework's own wrapper runs the program."""

INCUMBENTS = tuple(TORCHS)
"""All modes in which it does."""

PARTINGS = (Parting.AFTER_BACKWARD, Parting.AT_ONCE)
"""A Paceline run must equal one of these references: no backward adds to another tensor's memory."""

__all__ = [
    "CORPUS",
    "INCUMBENT",
    "INCUMBENTS",
    "MODES",
    "MUTATIONS",
    "OPEN",
    "PARTINGS",
    "expected_refusal",
    "generate",
    "incumbent_can_run",
    "incumbents_of",
    "is_engine_crash",
    "known_difference",
    "make_rank",
    "make_reference",
    "modes_of",
    "same_parameters",
    "tolerance",
    "writes_to_shared_gradients",
]


def tolerance(program: Program, mode: str) -> float:
    """The tolerance for values, relative to the largest of an array."""
    is_small = program.get("dtype") == "bfloat16" or any(
        op.get("amp") or op.get("to") == "bfloat16" for _, op in numbered(program["ops"])
    )
    return 0.1 if is_small else 3e-3


def same_parameters(program: Program) -> bool:
    """True if the program's own steps make the same bits on all ranks."""
    return not any(op["op"] == "ftz" for _, op in numbered(program["ops"]))


def incumbent_can_run(program: Program) -> bool:
    """True if the program uses no feature that only Paceline has."""
    ops = [op for _, op in numbered(program["ops"])]
    is_plain = not program.get("options") and not is_weighted(program)
    return is_plain and not any(
        (op["op"] == "iterate" and op.get("how") != "join") or "nest" in op for op in ops
    )


def writes_to_shared_gradients(program: Program) -> bool:
    """True if a hook writes to a gradient in the middle of backward.

    If autograd lets other gradients share that memory, torch alone has no unique result for those: it depends
    on which of them have been computed by then. Values on which both variants of the reference agree are
    still compared.
    """
    kinds = ("post scale", "post clamp_")
    return any(
        op["op"] == "hook" and op.get("kind", "post clamp_") in kinds for _, op in numbered(program["ops"])
    )


def is_engine_crash(program: Program, lost: Lost) -> bool:
    """True if Gloo has ended the process because ranks made calls of different sizes.

    They do if an error came on some ranks only: these continue with another model, or another call.
    """
    parts = any("ranks" in op for _, op in numbered(program["ops"]))
    is_gloo = "gloo::EnforceNotMet" in lost.stacks and "op.preamble.length <= op.nbytes" in lost.stacks
    return parts and lost.how == "was killed by SIGABRT" and is_gloo
