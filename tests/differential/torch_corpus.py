"""Small programs, each of which has found a bug; `make test` runs them all. Each is as shrunk as could be.

The name says what went wrong. `modes` are those in which it did; a program is equal there, or refused on all
ranks.
"""

from __future__ import annotations

from typing import Any

from tests.differential.programs import Op, Program


def _op(name: str, **arguments: Any) -> Op:
    return {"op": name, **arguments}


def _program(modes: list[str], layers: list[dict[str, Any]], *ops: Op, **more: Any) -> Program:
    return {"ranks": 2, "modes": modes, "models": [{"layers": layers}], "ops": list(ops), **more}


_LINEAR = {"kind": "linear"}
_LATE = {"lag": [0.05, 0.0]}  # rank 0 finds every other rank's gradients there
_CLEARED_AFTER_AN_EXCEPTION = (  # in place, while other ranks have not noticed
    _op("wrap"),
    _op("forward"),
    _op("backward"),
    _op("zero_grad", none=False),
    _op(
        "try",
        body=[_op("forward", data=1), _op("trap", place="backward"), _op("backward", **_LATE)],
        otherwise=[_op("zero_grad", none=False)],
    ),
    _op("forward", data=2),
    _op("backward"),
)

CORPUS: dict[str, Program] = {
    "a mean is written while backward still reads that memory": _program(
        ["tiny", "unused", "gloo memory", "hosts tiny"],
        [{"kind": "scale"}, {"kind": "add", "view": "unsqueeze"}, {"kind": "scale"}],
        _op("wrap"),
        _op("forward", batch=1),
        _op("backward", **_LATE),
    ),
    "two parameters have one memory as their gradients": _program(
        ["default", "tiny", "static"],
        [{"kind": "add", "view": "stack"}],
        _op("wrap"),
        _op("forward", batch=1),
        _op("backward"),
    ),
    "a hook that is registered after wrapping runs too late": _program(
        ["default", "view", "gloo"],
        [_LINEAR],
        _op("wrap"),
        _op("hook", kind="post clamp_"),
        _op("forward"),
        _op("backward", **_LATE),
    ),
    "a hook after wrapping replaces the gradient": _program(
        ["default", "view", "gloo"],
        [_LINEAR],
        _op("wrap"),
        _op("hook", kind="post replace"),
        _op("forward"),
        _op("backward"),
        _op("zero_grad"),
        _op("forward", data=1),
        _op("backward"),
    ),
    "a parameter grows after wrapping": _program(
        ["default", "view"],
        [{"kind": "table"}],
        _op("wrap"),
        _op("swap", how="grown"),
        _op("forward"),
        _op("backward"),
    ),
    "a parameter shrinks after wrapping": _program(
        ["default", "view"],
        [{"kind": "table", "rows": 6}],
        _op("wrap"),
        _op("swap", how="shrunk"),
        _op("forward"),
        _op("backward"),
    ),
    "a layer is replaced, at the address of the old one": _program(
        ["default", "unused"],
        [{"kind": "scale"}, _LINEAR],
        _op("wrap"),
        _op("forward"),
        _op("backward"),
        _op("replace", layer=0),
        _op("zero_grad"),
        _op("forward", data=1),
        _op("backward"),
    ),
    "denormal numbers are zero for one rank": _program(
        ["backend"],
        [],
        _op("ftz", ranks=[0]),
        _op("wrap"),
        _op("forward", scale=1e-39),
        _op("backward"),
    ),
    "a mean is corrected where denormal numbers are zero for one rank": _program(
        ["backend", "gloo"],
        [],
        _op("wrap"),
        _op("weight", values=[5.0, 3.0]),
        _op("ftz", ranks=[1]),
        _op("forward", scale=1e-39),
        _op("backward"),
    ),
    "rows are added where denormal numbers are zero for one rank": _program(
        ["default", "gloo"],
        [{"kind": "embedding", "sparse": True}],
        _op("ftz", ranks=[1]),
        _op("wrap"),
        _op("forward", scale=1e-39),
        _op("backward"),
    ),
    "one rank has a sparse gradient without rows, the other one has none": _program(
        ["unused view", "gloo unused"],
        [{"kind": "gate", "skips": [[0, 0]], "layers": [{"kind": "embedding", "sparse": True}]}],
        _op("wrap"),
        _op("forward", batch=[2, 0]),
        _op("backward"),
    ),
    "a norm is trusted after a write through .data": _program(
        ["default", "view", "hosts"],
        [_LINEAR],
        _op("wrap"),
        _op("forward"),
        _op("backward"),
        _op("clip", max=1e9),
        _op("zero_grad"),
        _op("forward", data=1),
        _op("backward"),
        _op("scale_grads", by=0.01, how="data"),
        _op("clip", max=0.1),
    ),
    "a norm is trusted after a pass that raised": _program(
        ["default"],
        [{"kind": "gate", "skips": [[1, 3]], "layers": [_LINEAR]}],
        _op("wrap"),
        _op("forward"),
        _op("backward"),
        _op("clip", max=1e9),
        _op("zero_grad"),
        _op("forward", scale=1000.0),
        _op("backward"),
        _op("zero_grad"),
        _op("forward"),
        _op("backward"),
        _op("zero_grad"),
        _op("try", body=[_op("forward"), _op("backward")]),
        _op("clip", max=1e9),
    ),
    "finite gradients whose sum is not": _program(
        ["default", "gloo", "hosts"],
        [],
        _op("wrap"),
        _op("forward", scale=1e38, data=12),
        _op("backward"),
        options={"nonfinite": "raise"},
    ),
    "a backward after one that raised": _program(
        ["default", "view", "gloo"],
        [_LINEAR, {"kind": "trap"}],
        _op("wrap"),
        _op("forward", to="a"),
        _op("forward", to="b", data=1),
        _op("try", body=[_op("trap", place="backward", ranks=[0]), _op("backward", of=["a"])]),
        _op("zero_grad"),
        _op("backward", of=["b"]),
        _op("forward"),
        _op("backward"),
    ),
    "torch's wrapper around ours": _program(
        ["default", "gloo"],
        [_LINEAR],
        _op("wrap", nest="torch outside"),
        _op("forward"),
        _op("backward"),
        _op("zero_grad"),
        _op("forward", data=1),
        _op("backward", **_LATE),
    ),
    "ours around torch's wrapper": _program(
        ["default", "gloo"],
        [_LINEAR],
        _op("wrap", nest="torch inside"),
        _op("forward"),
        _op("backward"),
        _op("zero_grad"),
        _op("forward", data=1),
        _op("backward", **_LATE),
    ),
    "the first gradient after uneven data": _program(
        ["default", "view", "gloo", "hosts tiny view"],
        [_LINEAR],
        _op("wrap"),
        _op("optimizer"),
        _op(
            "iterate",
            counts=[1, 3],
            body=[_op("forward"), _op("backward"), _op("step"), _op("zero_grad")],
        ),
        _op("forward", data=1),
        _op("backward"),
    ),
    "the first gradient after join()": _program(
        ["gloo"],
        [_LINEAR],
        _op("wrap"),
        _op("optimizer"),
        _op(
            "iterate",
            how="join",
            counts=[1, 3],
            body=[_op("forward"), _op("backward"), _op("step"), _op("zero_grad")],
        ),
        _op("forward", data=1),
        _op("backward"),
    ),
    "gradients that no_sync() leaves in one memory": _program(
        ["default", "view", "gloo"],
        [{"kind": "add", "view": "stack"}],
        _op("wrap"),
        _op("forward"),
        _op("backward", no_sync=True),
        _op("forward", data=1),
        _op("backward"),
    ),
    "gradients that two backwards in no_sync() add to in one memory": _program(
        ["default", "unused", "backend"],
        [{"kind": "add"}, {"kind": "add", "view": "cat"}],
        _op("wrap"),
        _op("forward", batch=1),
        _op("backward", no_sync=True),
        _op("forward", data=1),
        _op("backward", no_sync=True),
        _op("forward", data=2),
        _op("backward"),
    ),
    "gradients in one memory that a forward in no_sync() adds to": _program(
        ["default", "backend"],
        [{"kind": "add"}, {"kind": "add", "view": "view"}],
        _op("wrap"),
        _op("forward", batch=1),
        _op("backward", no_sync=True),
        _op("forward", data=1, no_sync=True),
        _op("backward"),
        _op("forward", data=2),
        _op("backward"),
    ),
    "a hook that writes to a gradient in memory of another one": _program(
        ["default", "view"],
        [{"kind": "add", "view": "stack"}],
        _op("hook", kind="post scale", param=5),
        _op("wrap"),
        _op("forward"),
        _op("backward"),
    ),
    "a sparse gradient beside one that is staged": _program(
        ["tiny", "view"],
        [{"kind": "embedding", "sparse": True}, {"kind": "complex"}],
        _op("wrap"),
        _op("forward"),
        _op("backward"),
    ),
    "gradients that are cut from one tensor count one version": _program(
        ["default", "tiny", "backend"],
        [{"kind": "add", "view": "cat"}],
        _op("wrap"),
        _op("forward", batch=1),
        _op("backward"),
        _op("forward", batch=1, data=1),
        _op("backward"),
    ),
    "a gradient that lies in memory of one that is staged": {
        **_program(
            ["default", "unused"],
            [],
            _op("wrap"),
            _op("wrap", model=1),
            _op("forward", batch=1),
            _op("backward", **_LATE),
        ),
        "models": [
            {
                "layers": [
                    {"kind": "add", "view": "cat"},
                    {"kind": "add", "view": "unsqueeze"},
                    {"kind": "scale"},
                ]
            },
            {"layers": [{"kind": "borrow", "layer": 1}]},
        ],
    },
    "others still write to gradients after an exception": _program(
        ["view", "gloo tiny view", "hosts tiny view"],
        [{"kind": "scale"}, {"kind": "trap"}, {"kind": "scale"}],
        *_CLEARED_AFTER_AN_EXCEPTION,
    ),
    "a mean is written after an exception": _program(
        ["default", "tiny", "view", "unused"],
        [{"kind": "trap"}, {"kind": "checkpoint", "layers": [{"kind": "scale"}]}],
        *_CLEARED_AFTER_AN_EXCEPTION,
    ),
    "buffers after a pass that raised": _program(  # the reference had not recomputed
        ["default", "gloo"],
        [{"kind": "checkpoint", "reentrant": True, "layers": [{"kind": "buffer"}, {"kind": "scale"}]}],
        _op("wrap"),
        _op("try", body=[_op("forward", scale=2e38), _op("backward")]),
        _op("zero_grad"),
        _op("forward"),
        _op("backward"),
        options={"nonfinite": "raise"},
    ),
    "ranks are in backwards of two models of one shape": {
        "ranks": 2,
        "modes": ["gloo", "backend"],
        "models": [{"layers": [_LINEAR, {"kind": "trap"}]}, {"layers": [_LINEAR, {"kind": "trap"}]}],
        "ops": [
            _op("wrap"),
            _op("wrap", model=1),
            _op("forward", to="m0"),
            _op("backward", of=["m0"]),
            _op("forward", to="m1", model=1),
            _op("backward", of=["m1"]),
            _op("zero_grad"),
            _op(
                "try",
                body=[_op("trap", place="forward", ranks=[1]), _op("forward", data=1), _op("backward")],
                otherwise=[_op("zero_grad")],
            ),
            _op("try", body=[_op("forward", data=2, model=1), _op("backward")]),
        ],
    },
    # The five below have found mistakes of the judge, of the reference and of the machine.
    "a rank without data takes part in the pass that it has left": _program(
        ["tiny", "gloo"],
        [{"kind": "trap"}],
        _op("wrap"),
        _op(
            "try",
            body=[_op("trap", place="forward", ranks=[0]), _op("forward"), _op("backward")],
            otherwise=[_op("zero_grad")],
        ),
        _op("iterate", body=[]),
        _op("zero_grad"),
        _op("forward", data=1),
        _op("backward"),
    ),
    "rows that are weighed have momentum": _program(
        ["tiny", "gloo"],
        [{"kind": "embedding", "sparse": True}],
        _op("wrap"),
        _op("optimizer", kind="momentum"),
        _op("forward"),
        _op("backward"),
        _op("step"),
        _op(
            "iterate",
            counts=[0, 2],
            body=[_op("zero_grad"), _op("forward"), _op("weight", values=3.0), _op("backward"), _op("step")],
        ),
    ),
    "backward adds to a mean without rows": _program(
        ["tiny", "gloo tiny view", "backend"],
        [{"kind": "embedding", "sparse": True}],
        _op("wrap"),
        _op("backward"),
        _op("forward", batch=[2, 0]),
        _op("weight", values=[0.0, 3.0]),
        _op("backward"),
        _op("forward", batch=[2, 0], data=4),
        _op("weight", values=[0.0, 3.0]),
        _op("backward"),
    ),
    "a parameter shrinks on one rank": _program(
        ["tiny", "gloo"],
        [{"kind": "table"}],
        _op("wrap"),
        _op("swap", how="shrunk", ranks=[1]),
        _op("forward"),
        _op("backward"),
    ),
    "one rank converts a frozen parameter": {
        "ranks": 2,
        "modes": ["tiny", "gloo"],
        "models": [{"layers": [{"kind": "table"}], "frozen": [1]}],
        "ops": [
            _op("wrap"),
            _op("optimizer"),
            _op("swap", how="dtype", ranks=[0]),
            _op("forward"),
            _op("backward"),
            _op("step"),
        ],
    },
    "one rank has no gradient of a layer that two models in one backward have": {
        "ranks": 2,
        "modes": ["unused", "unused view", "static", "hosts unused", "hosts static", "gloo unused"],
        "models": [
            {"layers": [{"kind": "gate", "ranks": [1], "layers": [_LINEAR]}]},
            {"layers": [{"kind": "borrow"}]},
        ],
        "ops": [
            _op("wrap"),
            _op("wrap", model=1),
            _op("forward", model=1, to="m1"),
            _op("forward", to="m0"),
            _op("backward", of=["m0", "m1"]),
        ],
    },
    "a layer of two models gets its gradient before the second one's backward begins": {
        "ranks": 2,
        "modes": ["default", "unused"],
        "models": [
            {"layers": [_LINEAR]},
            {"layers": [{"kind": "gate", "ranks": [1], "layers": [{"kind": "borrow"}]}]},
        ],
        "ops": [
            _op("wrap"),
            _op("wrap", model=1),
            _op("forward", model=1, to="m1"),
            _op("forward", to="m0"),
            _op("backward", of=["m0", "m1"]),
        ],
    },
    # Gloo's, which ends a process that gets more bytes than it expects; all other ranks raise.
    "ranks are in backwards of two models of different sizes": {
        "ranks": 2,
        "modes": ["gloo"],
        "models": [{"layers": [_LINEAR, {"kind": "trap"}]}, {"layers": []}],
        "ops": [
            _op("wrap"),
            _op("wrap", model=1),
            _op(
                "try",
                body=[_op("trap", place="forward", ranks=[1]), _op("forward"), _op("backward")],
                otherwise=[_op("zero_grad")],
            ),
            _op("try", body=[_op("forward", data=2, model=1), _op("backward")]),
        ],
    },
}

OPEN: frozenset[str] = frozenset()
"""Programs of the corpus whose bug is not mended yet; take the name out with the mending."""
