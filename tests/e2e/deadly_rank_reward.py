"""A reward function that kills an SGLang rank when it scores the last response of the first step."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import psutil

MARK = "MEGARL_E2E_RUN"
ROWS = 24
_calls = 0


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return a number that differs between responses."""
    global _calls
    _calls += 1
    if _calls == ROWS:
        sglang_ranks()[-1].kill()
    return float(sum(map(ord, solution_str)) % 7)


def sglang_ranks() -> list[psutil.Process]:
    """SGLang's scheduler processes of this run."""
    ranks = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_rank = "sglang::scheduler" in " ".join(process.cmdline())
            if is_rank and process.environ().get(MARK) == os.environ[MARK]:
                ranks.append(process)
    return ranks
