"""Whether a layout's pipeline can hold a number of layers, and if not, what would."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megarl.errors import ConfigError
from megarl.models.layout import ParallelLayout


def check_pipeline(num_layers: int, layout: ParallelLayout, field: str) -> None:
    """Checks that the layers divide over stages and chunks as the layout says.

    The error is about the most particular key whose change alone would help.

    Args:
        num_layers: decoder layers of the model.
        layout: the role's layout.
        field: the config group that the layout came from.

    Raises:
        ConfigError: they do not; names the key, its value and every value that would be right.
    """
    if holds(num_layers, layout):
        return
    sizes: tuple[int | None, ...] = tuple(range(1, num_layers + 1))
    particular: list[tuple[str, str, Any, tuple[int | None, ...]]] = [
        ("vpp", "virtual_pipeline_model_parallel_size", 1, sizes),
        ("first_stage_layers", "num_layers_in_first_pipeline_stage", None, (None, *sizes)),
        ("last_stage_layers", "num_layers_in_last_pipeline_stage", None, (None, *sizes)),
    ]
    for name, key, default, candidates in particular:
        value = getattr(layout, name)
        right = _right(num_layers, layout, name, candidates)
        if value != default and right:
            raise ConfigError(
                f"{field}.{key}={value} does not divide {_counted(num_layers, layout)} over "
                f"pipeline_model_parallel_size={layout.pp}; valid for this model: {_listed(right)}"
            )
    stages = range(1, num_layers + layout.embedding_as_layer + layout.loss_as_layer + 1)
    even = layout._replace(vpp=1, first_stage_layers=None, last_stage_layers=None)
    right = _right(num_layers, layout, "pp", stages) or _right(num_layers, even, "pp", stages)
    problem = "exceeds" if layout.pp > stages[-1] else "does not divide"
    raise ConfigError(
        f"{field}.pipeline_model_parallel_size={layout.pp} {problem} {_counted(num_layers, layout)}; "
        f"valid for this model: {_listed(right)}"
    )


def holds(num_layers: int, layout: ParallelLayout) -> bool:
    """Whether the layers divide over the stages and chunks of the layout, and none but the ends is left without."""
    if min(layout.pp, layout.vpp) < 1 or (layout.vpp > 1 and layout.pp == 1):
        return False
    try:
        sizes = layout.chunk_sizes(num_layers)
    except ValueError:
        return False
    return sizes[0] + layout.embedding_as_layer > 0 < sizes[-1] + layout.loss_as_layer and all(sizes[1:-1])


def _right(num_layers: int, layout: ParallelLayout, name: str, candidates: Iterable[Any]) -> list[int | None]:
    changes: list[dict[str, Any]] = [{name: value} for value in candidates]
    return [change[name] for change in changes if holds(num_layers, layout._replace(**change))]


def _counted(num_layers: int, layout: ParallelLayout) -> str:
    counted = [word for word, on in (("embedding", layout.embedding_as_layer), ("loss", layout.loss_as_layer)) if on]
    more = f" (and {' and '.join(counted)}, each as one layer)" if counted else ""
    return f"the model's num_hidden_layers={num_layers}{more}"


def _listed(values: list[int | None]) -> str:
    return ", ".join("null" if value is None else str(value) for value in values)
