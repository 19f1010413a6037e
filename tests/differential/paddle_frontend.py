"""The Paddle side of the fuzzer: the names that the files without a framework use."""

from __future__ import annotations

# Modules that would otherwise be imported in every fork.
import numpy.random  # noqa: F401
import paddle.distributed.auto_parallel.fully_shard_fusion
import paddle.optimizer.fusion_utils  # noqa: F401

from tests.differential.paddle_corpus import CORPUS, OPEN
from tests.differential.paddle_differences import incumbents_of, known_difference
from tests.differential.paddle_grammar import generate, modes_of
from tests.differential.paddle_mutations import MUTATIONS
from tests.differential.paddle_reference import make_reference
from tests.differential.paddle_refusals import expected_refusal
from tests.differential.paddle_subjects import MODES, PADDLE, PADDLES, make_rank
from tests.differential.programs import Program, is_weighted, numbered
from tests.differential.records import Lost
from tests.differential.walk import Parting

INCUMBENT = PADDLE
"""The mode in which the framework's own wrapper runs the program."""

INCUMBENTS = tuple(PADDLES)
"""All modes in which it does."""

PARTINGS = tuple(Parting)
"""The variants of the reference of which a Paceline run must equal one."""

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
    return 0.1 if mode.startswith("bfloat16") else 3e-3


def same_parameters(program: Program) -> bool:
    """True if the program's own steps make the same bits on all ranks."""
    return True


def incumbent_can_run(program: Program) -> bool:
    """True if the program uses no feature that only Paceline has."""
    is_plain = not program.get("options") and not is_weighted(program)
    return is_plain and not any(op["op"] == "iterate" for _, op in numbered(program["ops"]))


def writes_to_shared_gradients(program: Program) -> bool:
    """False: Paddle's gradients have separate memory, so a hook may write to one during backward."""
    return False


def is_engine_crash(program: Program, lost: Lost) -> bool:
    """True if Paddle's Gloo has ended the process because ranks made calls of different sizes.

    They do if an error came on some ranks only: these continue with another model, or another call.
    """
    parts = any("ranks" in op for _, op in numbered(program["ops"]))
    return parts and lost.how == "was killed by SIGABRT" and "gloo::transport::tcp::Pair::read" in lost.stacks
