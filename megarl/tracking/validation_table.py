"""What an evaluation found, as a table with a row per data source."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich import box
from rich.table import Table

_PROMPTS = re.compile(r"val-aux/(.+)/num_prompts")


def validation_table(metrics: Mapping[str, float], samples: int) -> Table:
    """A row per data source: prompts; mean, best and majority of N answers; their length in tokens; failed rewards.

    Args:
        metrics: of a validation, ``val-core/...`` and ``val-aux/...``; what they lack of a data source is a dash.
        samples: N, answers per prompt.
    """
    of_n = [f"mean@{samples}", *([f"best@{samples}", f"maj@{samples}"] if samples > 1 else [])]
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("data source", overflow="fold")
    table.add_column("variable", overflow="fold")
    for title in ("prompts", *of_n, "length", "failed"):
        table.add_column(title, justify="right", no_wrap=True)
    for source in [match[1] for match in map(_PROMPTS.fullmatch, metrics) if match]:
        variable = _variable(metrics, source, of_n[0])
        core = f"val-core/{source}/{variable}"
        found = [f"{core}/{of_n[0]}", *(f"{core}/{name}/mean" for name in of_n[1:])]
        table.add_row(
            source,
            variable,
            _cell(metrics, f"val-aux/{source}/num_prompts", "g"),
            *(_cell(metrics, name, ".3f") for name in found),
            _cell(metrics, f"val-aux/{source}/response_length/mean", ".1f"),
            _cell(metrics, f"val-aux/{source}/failed_rewards", "g"),
        )
    return table


def _variable(metrics: Mapping[str, float], source: str, mean: str) -> str:
    """The one that ``val-core`` has of a data source."""
    begin, end = f"val-core/{source}/", f"/{mean}"
    found = (name[len(begin) : -len(end)] for name in metrics if name.startswith(begin) and name.endswith(end))
    return next((name for name in found if "/" not in name), "-")


def _cell(metrics: Mapping[str, float], name: str, form: str) -> str:
    return format(metrics[name], form) if name in metrics else "-"
