"""Reward functions for the tests of the pool, referenced by ``path.py`` and imported in its processes."""

import asyncio
import ctypes
import os
import re
import resource
import subprocess
import time
from pathlib import Path

CALLS = 0


def misbehaving(data_source, solution_str, ground_truth, extra_info):
    """Fails in the way named by the response."""
    global CALLS
    CALLS += 1
    if solution_str == "regex":  # holds the interpreter lock for longer than any test
        re.match(r"(a+)+$", "a" * 50 + "b")
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "unreachable":
        raise ConnectionError("the service is unreachable")
    if solution_str == "wrong":
        raise KeyError("no such thing")
    if solution_str == "sleeping child":
        return subprocess.Popen(["sleep", "1000"]).pid
    return {"score": len(solution_str), "calls": CALLS, "process": os.getpid()}


def fails_once(data_source, solution_str, ground_truth, extra_info):
    """Raises a TimeoutError at the first attempt."""
    if not Path(ground_truth).exists():
        with Path(ground_truth).open("w", encoding="utf-8"):
            pass
        raise TimeoutError("too slow")
    return 1.0


def whole_batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    """Scores each response by its rank in length."""
    if "regex" in solution_strs:
        re.match(r"(a+)+$", "a" * 50 + "b")
    return [
        {"score": sorted(solution_strs, key=len).index(text) + bonus, "of": len(solution_strs)}
        for text in solution_strs
    ]


async def sleeping(data_source, solution_str, ground_truth, extra_info):
    """Sleeps the number of seconds in the response; ``block`` blocks the event loop."""
    if solution_str == "block":
        re.match(r"(a+)+$", "a" * 50 + "b")
    await asyncio.sleep(float(solution_str))
    return float(solution_str)


WAITING: list[asyncio.Future] = []


async def barrier(data_source, solution_str, ground_truth, extra_info):
    """Waits until the number of concurrent calls equals the response, then releases all."""
    arrived = asyncio.get_running_loop().create_future()
    WAITING.append(arrived)
    if len(WAITING) == int(solution_str):
        for future in WAITING:
            future.set_result(None)
        WAITING.clear()
    await arrived
    return float(solution_str)


def odd_results(data_source, solution_str, ground_truth, extra_info):
    """Returns extra fields of many types."""
    return {"score": 1, "lock": time.localtime, "bytes": b"x", "set": {1}, "nested": {1: (2, 3.5)}, "big": 2**70}


def echo(data_source, solution_str, ground_truth, extra_info, prompt_str):
    """Returns its arguments."""
    extra_info["seen"] = True
    return {"score": 0, "arguments": [data_source, solution_str, ground_truth, extra_info, prompt_str]}


def consuming(data_source, solution_str, ground_truth, extra_info):
    """Scores the unused hints and answers, and uses them up."""
    score = len(extra_info["hints"]) + 10 * len(ground_truth["answers"])
    extra_info["hints"].clear()
    ground_truth["answers"].clear()
    return score


LEAKED: list[bytearray] = []
LEAK_BYTES = 16 << 20


def leaking(data_source, solution_str, ground_truth, extra_info):
    """Keeps 16 MiB per call under a limit of 64 MiB; ``huge`` does not fit at all."""
    if not LEAKED:
        used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 4 * LEAK_BYTES, resource.RLIM_INFINITY))
    LEAKED.append(bytearray(LEAK_BYTES * (100 if solution_str == "huge" else 1)))
    return 1.0
