"""Reward functions that the pool's tests name by ``path.py``; read by megarl in other processes, not by pytest."""

import asyncio
import ctypes
import os
import re
import subprocess
import time

CALLS = 0


def naughty(data_source, solution_str, ground_truth, extra_info):
    """Does what the response says."""
    global CALLS
    CALLS += 1
    if solution_str == "regex":  # holds the interpreter's lock, for longer than any run
        re.match(r"(a+)+$", "a" * 50 + "b")
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "away":
        raise ConnectionError("the service is away")
    if solution_str == "wrong":
        raise KeyError("no such thing")
    if solution_str == "sleeping child":
        return subprocess.Popen(["sleep", "1000"]).pid
    return {"score": len(solution_str), "calls": CALLS, "process": os.getpid()}


def once_away(data_source, solution_str, ground_truth, extra_info):
    """Cannot be computed at the first attempt."""
    if not os.path.exists(ground_truth):
        with open(ground_truth, "w"):
            pass
        raise TimeoutError("too slow")
    return 1.0


def whole_batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    """Ranks the answers of a batch by their lengths."""
    if "regex" in solution_strs:
        re.match(r"(a+)+$", "a" * 50 + "b")
    return [
        {"score": sorted(solution_strs, key=len).index(text) + bonus, "of": len(solution_strs)}
        for text in solution_strs
    ]


async def later(data_source, solution_str, ground_truth, extra_info):
    """Waits so many seconds; ``block`` blocks the loop."""
    if solution_str == "block":
        re.match(r"(a+)+$", "a" * 50 + "b")
    await asyncio.sleep(float(solution_str))
    return float(solution_str)


PRESENT: list[asyncio.Future] = []


async def meeting(data_source, solution_str, ground_truth, extra_info):
    """Waits until as many calls are under way; they leave together."""
    arrived = asyncio.get_running_loop().create_future()
    PRESENT.append(arrived)
    if len(PRESENT) == int(solution_str):
        for other in PRESENT:
            other.set_result(None)
        PRESENT.clear()
    await arrived
    return float(solution_str)


def odd_results(data_source, solution_str, ground_truth, extra_info):
    """Fields of all kinds."""
    return {"score": 1, "lock": time.localtime, "bytes": b"x", "set": {1}, "nested": {1: (2, 3.5)}, "big": 2**70}


def told(data_source, solution_str, ground_truth, extra_info, prompt_str):
    """What it was told."""
    extra_info["seen"] = True
    return {"score": 0, "told": [data_source, solution_str, ground_truth, extra_info, prompt_str]}
