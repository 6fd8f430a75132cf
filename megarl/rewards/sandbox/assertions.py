"""Assertions about a program, judged in another sandbox than the program's.

The program never sees a test: it gets calls with plain arguments and returns plain data. The judge runs the tests
without the program. Both run in rounds, so that this works with every sandbox that runs a program to its end:

1. The judge runs all tests and requests the calls whose results it lacks (usually all of them at once).
2. For each test, the program performs the calls in a new sandbox.
3. The judge runs again with the results, until every test has a verdict.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megarl.base.json_text import parse_json
from megarl.rewards.sandbox.local import TIMEOUT, Execution

MAX_ROUNDS = 32
"""Rounds of calls whose arguments depend on earlier results; more end as an error."""
_OWN_IMPORT = "from megarl."
_FINAL = ("passed", "wrong", "error")
RunProgram = Callable[[str, str], Awaitable[Execution]]


async def judge_assertions(run: RunProgram, program: str, tests: Sequence[str], limit_s: float) -> list[str]:
    """Judge tests of a program.

    Args:
        run: runs a source with a text for standard input in a new sandbox.
        tests: Python sources that raise an exception if the program is wrong.
        limit_s: seconds after which nothing further starts.

    Returns:
        Status of each test: ``passed``, ``wrong``, ``error`` or ``timeout``; shorter after the first timeout.
    """
    statuses: dict[int, str] = {}
    requests: list[list[Any]] = [[] for _ in tests]
    replies: list[list[Any]] = [[] for _ in tests]
    count, deadline = len(tests), time.monotonic() + limit_s
    for _ in range(MAX_ROUNDS):
        waiting = [number for number in range(count) if number not in statuses]
        if not waiting:
            break
        if time.monotonic() > deadline:
            statuses[waiting[0]], count = TIMEOUT, waiting[0] + 1
            continue
        pairs = [[tests[n], list(zip(requests[n], replies[n], strict=True))] for n in waiting]
        verdicts, status = await _run_judge(run, pairs)
        for number, verdict in zip(waiting, verdicts, strict=False):
            if verdict["verdict"] in _FINAL:
                statuses[number] = verdict["verdict"]
        if len(verdicts) < len(waiting):  # the judge ended early
            statuses[waiting[len(verdicts)]] = status
            count = waiting[len(verdicts)] + 1 if status == TIMEOUT else count
        for number, verdict in zip(waiting, verdicts, strict=False):
            if number in statuses or number >= count:
                continue
            requests[number] += verdict["requests"]
            if time.monotonic() > deadline:
                statuses[number], count = TIMEOUT, number + 1
                continue
            results, status = await _run_calls(run, program, requests[number])
            if results is None:
                statuses[number] = status
                count = number + 1 if status == TIMEOUT else count
            else:
                replies[number] = results
    return [statuses.get(number, "error") for number in range(count)]


async def _run_judge(run: RunProgram, pairs: list[Any]) -> tuple[list[dict[str, Any]], str]:
    """Return the verdicts of tests, and the status of the first test without one."""
    marker = secrets.token_hex(16)
    execution = await run(f"{_source('assertion_judge')}\nmain({marker!r})\n", json.dumps(pairs))
    parts = execution.stdout.split(marker)[1:]
    return [parse_json(part.splitlines()[0]) for part in parts], _status(execution)


async def _run_calls(run: RunProgram, program: str, requests: list[Any]) -> tuple[list[Any] | None, str]:
    """Return the program's replies to requests, or None and the status of the program."""
    marker = secrets.token_hex(16)
    source = f"{_source('program_calls')}\nanswer(names, {json.dumps(requests)!r}, {marker!r})\n"
    # a namespace of its own: names of the program and of this code may be equal
    call = f"exec({source!r}, {{'__name__': 'calls', 'names': globals()}})"
    execution = await run(f"{program}\n{call}\n", "")
    replies = _read_replies(execution.stdout.rpartition(marker)[2]) if marker in execution.stdout else None
    if execution.succeeded and isinstance(replies, list) and len(replies) == len(requests):
        return replies, "passed"
    return None, _status(execution)


def _read_replies(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _status(execution: Execution) -> str:
    return TIMEOUT if execution.status == TIMEOUT else "error"


@cache
def _source(name: str) -> str:
    """Return a file of this folder as one source, with the file that it imports."""
    parts = [Path(__file__).with_name(f"{part}.py").read_text(encoding="utf-8") for part in ("plain_data", name)]
    lines = [line for part in parts for line in part.splitlines() if not line.startswith(_OWN_IMPORT)]
    return "\n".join(lines)
