"""Samples and metrics rows of runs with known numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megarl.tracking.token_columns import TokenValues

HOSTILE = (
    "</script><script>document.title='taken'</script><!--<script> %%DATA%% &lt; \u2028 "
    "<img src=x onerror=document.title='taken'>"
)
MakeRun = Callable[..., Path]


def sample(number: int, step: int, output: str = "4 2", **more: Any) -> dict[str, Any]:
    """Answer of four tokens: the first character of ``output``, the second, the rest, and an empty end token."""
    values = {
        "advantage": np.array([1.0, -0.5, 0.25, 0.0]),
        "log_prob": np.array([-0.125, -2.0, -0.5, -4.0]),
        "mask": np.array([1.0, 0.0, 1.0, 1.0]),
    }
    lengths = [1, 1, len(output) - 2, 0]
    return {
        "input": f"question {number}",
        "output": output,
        "gts": "42",
        "score": float(number % 2),
        "step": step,
        "data_source": "even" if number % 2 == 0 else "odd",
        "response_length": 4 + number,
        "tokens": TokenValues.of(lengths, values).encoded(),
        **more,
    }


def default_rows() -> list[dict[str, float]]:
    """Rows of ten steps; the reward rises by 0.1 each step. Step 0 and the last step have a validation."""
    validation = "val-core/a</script>/reward/mean@1"
    rows: list[dict[str, float]] = [{"step": 0, validation: 0.25, "timing_s/testing": 5.0}]
    for step in range(1, 11):
        row = {"step": step, "critic/score/mean": step / 10, "timing_s/gen": 1.0, "timing_s/step": 2.0}
        rows.append({**row, "actor/grad_norm": 10.0 ** (step % 3), "reward/failed": float(step == 4)})
    rows[-1] |= {validation: 0.75, "timing_s/testing": 3.0}
    return rows
