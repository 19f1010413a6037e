"""The registry of wrapped models that have parameters in common."""

from __future__ import annotations

from paceline.reducer.backward.models_sharing_parameters import _Registry


class Model:
    """Replaces the backwards of a model; another one is collected while this one is looked at."""

    asked_timeout_s = None
    member = ""

    def __init__(self, registry: _Registry) -> None:
        self._registry = registry
        self.ends: Model | None = None
        self._parameters = [object()]

    @property
    def trainable(self) -> list[object]:
        if self.ends is not None:
            self._registry.leave(self.ends)
        return self._parameters

    def refresh_sharing(self) -> None:
        self._registry.shared_by_others(self)


def test_a_model_may_be_collected_while_all_are_looked_at() -> None:
    registry = _Registry()
    models = [Model(registry) for _ in range(3)]
    for model in models[:2]:
        registry.join(model)
    models[0].ends = models[1]
    registry.join(models[2])
    assert registry.shared_by_others(models[2]) == set()
