"""Small programs that have found a bug, each shrunk as far as possible.

The name describes the bug. `modes` are those in which it appeared; there, a program must now be equal, or
refused on all ranks.
"""

from __future__ import annotations

from typing import Any

from tests.differential.programs import Op, Program


def _op(name: str, **arguments: Any) -> Op:
    return {"op": name, **arguments}


def _program(modes: list[str], layers: list[dict[str, Any]], *ops: Op, **more: Any) -> Program:
    models = [
        {"layers": layers, "frozen": more.pop("frozen", [])},
        *({"layers": other} for other in more.pop("others", [])),
    ]
    return {"ranks": 2, "modes": modes, "models": models, "ops": list(ops), **more}


_LINEAR = {"kind": "linear"}
_LATE = {"lag": [0.05, 0.0]}  # rank 0 finds every other rank's gradients there
_CLEARED_AFTER_AN_EXCEPTION = (  # in place, before other ranks have noticed
    _op("forward"),
    _op("backward"),
    _op("clear"),
    _op(
        "try",
        body=[_op("forward", data=1), _op("trap", place="backward"), _op("backward", **_LATE)],
        otherwise=[_op("clear")],
    ),
    _op("forward", data=2),
    _op("backward"),
)

CORPUS: dict[str, Program] = {
    "a PyLayer gives one gradient to two": _program(
        ["default", "tiny"],
        [{"kind": "scale"}, {"kind": "own", "shares": True}, {"kind": "own", "shares": True}, _LINEAR],
        *(
            op
            for data in (1, 2)
            for op in (
                _op("clear", zero=False),
                _op("forward", batch=1, data=data),
                _op("backward", **_LATE),
            )
        ),
    ),
    "a hook that is registered after wrapping runs too late": _program(
        ["default", "view", "group"],
        [_LINEAR],
        _op("hook", kind="end clip"),
        *(
            op
            for data in (1, 2)
            for op in (_op("clear"), _op("forward", data=data), _op("backward", **_LATE))
        ),
    ),
    "a parameter grows after wrapping": _program(
        ["default", "view"],
        [{"kind": "table"}],
        _op("swap", how="grown"),
        _op("forward"),
        _op("backward"),
    ),
    "a parameter shrinks after wrapping": _program(
        ["default", "view"],
        [{"kind": "table", "rows": 6}],
        _op("swap", how="shrunk"),
        _op("forward"),
        _op("backward"),
    ),
    "a backward after one that raised": _program(
        ["default", "view", "group"],
        [_LINEAR, {"kind": "trap"}],
        _op("forward", to="a"),
        _op("forward", to="b", data=1),
        _op("try", body=[_op("trap", place="backward", ranks=[0]), _op("backward", of=["a"])]),
        _op("clear"),
        _op("backward", of=["b"]),
        _op("forward"),
        _op("backward"),
    ),
    "the first gradient after uneven data": _program(
        ["default", "view", "group"],
        [_LINEAR],
        _op("optimizer"),
        _op(
            "iterate",
            counts=[1, 3],
            body=[_op("forward"), _op("backward"), _op("step"), _op("clear", zero=False)],
        ),
        _op("forward", data=1),
        _op("backward"),
    ),
    "a network that is wrapped anew": _program(
        ["default", "view"],
        [_LINEAR],
        _op("forward"),
        _op("backward"),
        _op("wrap"),
        _op("clear", zero=False),
        _op("forward", data=1),
        _op("backward", **_LATE),
    ),
    "two models with one encoder": _program(
        ["default", "view", "group"],
        [_LINEAR],
        _op("wrap", model=1),
        _op("forward", to="m0"),
        _op("forward", to="m1", model=1),
        _op("backward", of=["m0"], **_LATE),
        _op("backward", of=["m1"], **_LATE),
        others=[[{"kind": "borrow"}, {"kind": "scale"}]],
    ),
    "a mean is lost after clear_grad()": _program(
        ["unused", "unused one bucket"],
        [{"kind": "gate", "skips": [[0, 1]], "layers": [_LINEAR]}],
        *(op for data in (1, 2) for op in (_op("clear"), _op("forward", data=data), _op("backward"))),
        _op("forward", data=3),
        _op("backward"),
    ),
    "a frozen scale of batch normalisation leaves its shift without a gradient": _program(
        ["default", "group"],
        [_LINEAR, {"kind": "norm"}],
        _op("forward"),
        _op("backward"),
        frozen=[3],
    ),
    "a shift without a gradient after uneven data": _program(
        ["default", "tiny"],
        [{"kind": "norm"}, {"kind": "add", "view": "chunk"}],
        _op("optimizer"),
        _op(
            "iterate",
            how="loader",
            counts=[1, 3],
            body=[_op("forward"), _op("backward"), _op("step"), _op("clear", zero=False)],
        ),
        _op("clear", zero=False),
        _op("forward", data=3),
        _op("backward"),
        frozen=[1],
    ),
    "weights of micro-batches where an old wrapper lives": _program(
        ["default", "unused"],
        [_LINEAR],
        _op("wrap", keep=True),
        _op("clear", zero=False),
        *(
            op
            for data in (1, 2)
            for op in (
                _op("forward", data=data, no_sync=True),
                _op("weight", values=[1.0, 2.0]),
                _op("backward", no_sync=True),
            )
        ),
        _op("forward", data=3),
        _op("weight", values=[3.0, 1.0]),
        _op("backward"),
    ),
    "a step is made with a mean without rows": _program(
        ["tiny", "group tiny view"],
        [{"kind": "embedding", "sparse": True}],
        _op("wrap"),
        _op("optimizer", kind="sgd"),
        _op(
            "iterate",
            counts=[2, 1],
            body=[_op("forward"), _op("weight", values=[0.0, 3.0]), _op("backward"), _op("step")],
        ),
    ),
    "weights begin while the parameters are frozen": _program(
        ["tiny view", "group tiny view"],
        [_LINEAR],
        _op("wrap"),
        _op("freeze"),
        _op("weight", values=[3.0, 0.0]),
    ),
    "a gradient of another dtype is added to one that lives in its bucket": _program(
        ["group tiny view", "tiny view"],
        [{"kind": "add"}, {"kind": "table"}, {"kind": "norm"}, {"kind": "add"}],
        _op("wrap"),
        _op("forward"),
        _op("backward"),
        _op("swap", how="dtype", ranks=[1]),
        _op("clear"),
        _op("forward", batch=1),
        _op("backward"),
    ),
    "others still write to gradients after an exception": _program(
        ["view", "tiny view", "group tiny view"],
        [{"kind": "scale"}, {"kind": "trap"}, {"kind": "scale"}],
        *_CLEARED_AFTER_AN_EXCEPTION,
    ),
    "a mean is written after an exception": _program(
        ["default", "tiny", "tiny view", "unused"],
        [{"kind": "trap"}, {"kind": "recompute", "layers": [{"kind": "scale"}]}],
        *_CLEARED_AFTER_AN_EXCEPTION,
    ),
    "running statistics after a backward that raised": _program(  # the reference had not recomputed
        ["default", "group tiny view"],
        [{"kind": "recompute", "layers": [{"kind": "norm"}]}],
        _op("try", body=[_op("forward", nan=[0]), _op("backward")]),
        _op("clear"),
        _op("forward"),
        _op("backward"),
        options={"nonfinite": "raise"},
    ),
    # Gloo ends a process that receives more bytes than it expects; all other ranks raise.
    "ranks are in backwards of two models of different sizes": {
        "ranks": 3,
        "modes": ["group"],
        "models": [{"layers": [_LINEAR, {"kind": "trap"}]}, {"layers": []}],
        "ops": [
            _op("wrap", model=1),
            _op(
                "try",
                body=[_op("trap", place="forward", ranks=[2]), _op("forward"), _op("backward")],
                otherwise=[_op("clear")],
            ),
            _op("try", body=[_op("forward", data=2, model=1), _op("backward")]),
        ],
    },
    "ranks are in backwards of two models of one shape": {
        "ranks": 2,
        "modes": ["group", "group tiny view"],
        "models": [{"layers": [_LINEAR, {"kind": "trap"}]}, {"layers": [_LINEAR, {"kind": "trap"}]}],
        "ops": [
            _op("wrap", model=1),
            _op("forward", to="m0"),
            _op("backward", of=["m0"]),
            _op("forward", to="m1", model=1),
            _op("backward", of=["m1"]),
            _op("clear"),
            _op(
                "try",
                body=[_op("trap", place="forward", ranks=[1]), _op("forward", data=1), _op("backward")],
                otherwise=[_op("clear")],
            ),
            _op("try", body=[_op("forward", data=2, model=1), _op("backward")]),
        ],
    },
    "a weighed gradient is undefined": _program(
        ["view", "group"],
        [{"kind": "norm"}],
        _op("forward"),
        _op("weight"),
        _op("backward", no_sync=True),
        _op("forward"),
        _op("weight"),
        _op("backward"),
        frozen=[1],
    ),
    "one rank has no gradient of a layer that two models in one backward have": {
        "ranks": 2,
        "modes": ["unused", "unused view"],
        "models": [
            {"layers": [{"kind": "gate", "ranks": [1], "layers": [_LINEAR]}]},
            {"layers": [{"kind": "borrow"}]},
        ],
        "ops": [
            _op("wrap", model=1),
            _op("forward", model=1, to="m1"),
            _op("forward", to="m0"),
            _op("backward", of=["m0", "m1"]),
        ],
    },
    # The programs below found mistakes of the judge and of the reference.
    "a rank without data takes part in the backward that it has left": _program(
        ["tiny", "group"],
        [{"kind": "trap"}],
        _op(
            "try",
            body=[_op("trap", place="forward", ranks=[0]), _op("forward"), _op("backward")],
            otherwise=[_op("clear")],
        ),
        _op("iterate", body=[]),
        _op("clear"),
        _op("forward", data=1),
        _op("backward"),
    ),
    "a backward of a model whose parameters are all frozen": _program(
        ["tiny", "group"],
        [{"kind": "buffer"}],
        _op("freeze"),
        _op("forward"),
        _op("backward"),
    ),
    "a parameter that one rank has used is frozen before two backward passes": _program(
        ["unused", "unused view"],
        [{"kind": "gate", "ranks": [0], "layers": [{"kind": "add"}]}],
        _op("forward"),
        _op("forward", to="b"),
        _op("freeze", param=1),
        _op("backward", of=["b"]),
        _op("backward"),
    ),
    "a parameter that one rank has used in no_sync() is frozen before the next backward": _program(
        ["unused", "unused view", "group unused", "hosts unused"],
        [{"kind": "gate", "ranks": [0], "layers": [{"kind": "add"}]}],
        _op("forward"),
        _op("backward"),
        _op("forward", no_sync=True),
        _op("backward", no_sync=True),
        _op("freeze", param=1),
        _op("forward"),
        _op("backward"),
    ),
    "a parameter that one rank alone has used in no_sync() is frozen before the next backward": _program(
        ["unused", "unused view", "group unused", "hosts unused"],
        [{"kind": "gate", "ranks": [0], "layers": [{"kind": "add"}]}],
        _op("forward"),
        _op("backward"),
        _op("forward", no_sync=True, ranks=[0]),
        _op("backward", no_sync=True, ranks=[0]),
        _op("freeze", param=1),
        _op("forward"),
        _op("backward"),
    ),
    "a forward without a backward weighs in the next one": _program(
        ["tiny", "unused", "group", "hosts"],
        [_LINEAR],
        _op("lost", data=1, weight=[5.0, 0.5]),
        _op("forward", weight=[1.0, 3.0]),
        _op("lost", data=2, weight=[5.0, 0.5], how="eval", keep=True),
        _op("backward"),
        _op("forward", data=3, weight=[1.0, 3.0]),
        _op("backward", retain=True),
        _op("backward"),
        weighs=True,
    ),
    "a backward after one that has raised counts as one through no forward": _program(
        ["tiny", "unused"],
        [{"kind": "trap"}, _LINEAR],
        _op("forward", to="a", weight=[1.0, 3.0]),
        _op("forward", to="b", data=1, weight=[2.0, 1.0]),
        _op(
            "try",
            body=[_op("trap", place="backward"), _op("backward", of=["a"])],
            otherwise=[_op("clear")],
        ),
        _op("backward", of=["b"]),
        weighs=True,
    ),
    "buffers differ where the data of all ranks ends at once": _program(
        ["group unused", "unused"],
        [{"kind": "buffer"}],
        _op("forward"),
        _op("iterate", body=[]),
        _op("forward"),
        _op("backward"),
    ),
}
for _each in CORPUS.values():
    _each["ops"].insert(0, _op("wrap"))

OPEN: frozenset[str] = frozenset()
"""Programs of the corpus whose bug is still open; remove a name when its bug is fixed."""
