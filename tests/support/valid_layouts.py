"""Layouts for tests of checkpoints, conversion and resume: all that megarl accepts, or a few that combine them."""

from __future__ import annotations

from itertools import product

from megarl.base.errors import ConfigError
from megarl.models import ModelConfig, ParallelLayout, check_layout

SIZES = (1, 2, 4)


def valid_layouts(config: ModelConfig, ranks: int) -> list[ParallelLayout]:
    """All layouts of a model with at most this number of processes and sizes of 1, 2 and 4, chunks included."""
    result = []
    for tp, pp, dp, cp, vpp in product(SIZES, SIZES, SIZES, SIZES, (1, 2)):
        expert_sizes = product(SIZES, (0, *(size for size in SIZES if size != tp))) if config.experts else [(1, 0)]
        for ep, etp in expert_sizes:
            layout = ParallelLayout(tp, pp, dp, cp, ep, etp, vpp)
            if layout.world_size <= ranks:
                try:
                    check_layout(config, layout, "megatron")
                except ConfigError:
                    continue
                result.append(layout)
    return result


def paired_layouts(config: ModelConfig, ranks: int) -> list[ParallelLayout]:
    """A few of the :func:`valid_layouts`, in which every two properties meet that meet in any of them."""
    layouts = valid_layouts(config, ranks)
    missing = set().union(*map(_pairs, layouts))
    chosen = []
    while missing:
        chosen.append(max(layouts, key=lambda layout: (len(_pairs(layout) & missing), -layout.world_size)))
        missing -= _pairs(chosen[-1])
    return chosen


def _pairs(layout: ParallelLayout) -> set[tuple[str, str]]:
    properties = [name for name in ("tp", "pp", "dp", "cp", "ep", "vpp") if getattr(layout, name) > 1]
    properties += ["etp below tp"] * (layout.expert_tp < layout.tp) + ["etp above tp"] * (layout.expert_tp > layout.tp)
    return set(product(properties, properties))
