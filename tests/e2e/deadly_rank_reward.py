"""A reward that kills one of SGLang's ranks, as it scores the last answer of the first step."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import psutil

MARK = "MEGARL_E2E_RUN"
ROWS = 24
_calls = 0


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """A number that differs between answers."""
    global _calls
    _calls += 1
    if _calls == ROWS:
        ranks_of_this_run()[-1].kill()
    return float(sum(map(ord, solution_str)) % 7)


def ranks_of_this_run() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_rank = "sglang::scheduler" in " ".join(process.cmdline())
            if is_rank and process.environ().get(MARK) == os.environ[MARK]:
                found.append(process)
    return found
