"""Cost of the timeline and of the watchdog's boards.

    python benchmarks/tracing.py [RUN FOLDER]

Prints the cost of a span when tracing is off, when it is shown on a board, and when it is recorded. With the folder of
a run with ``trainer.timeline.enable=true``, also prints the share of the steps by process: its events times that cost,
and in the driver the collection of events.
"""

from __future__ import annotations

import sys
import timeit
from collections import Counter, defaultdict
from pathlib import Path

from megarl.tracing import TRACER, TracingOptions, span, unwatch_process, watch_process
from megarl.tracing.trace_file import read_trace

REPEATS = 20_000


def one_span() -> None:
    with span("update_actor", "verb", arg0=3):
        pass


def cost_us() -> float:
    """Return the microseconds of a span, the best of five."""
    best = min(timeit.repeat(one_span, number=REPEATS, repeat=5)) / REPEATS * 1e6
    TRACER.take()
    return best


def main() -> None:
    off = cost_us()
    watch_process(TracingOptions(watched=True))
    board = cost_us()
    TRACER.recording = True
    recorded = cost_us()
    unwatch_process()
    print(f"a span: off {off:.2f} us, on a board {board:.2f} us, recorded {recorded:.2f} us")
    if len(sys.argv) < 2:
        return
    events = [event for event in read_trace(Path(sys.argv[1])) if event["ph"] != "M" or "name" in event.get("args", {})]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    counts = Counter(event["pid"] for event in events if event["ph"] != "M")
    fetching: dict[int, float] = defaultdict(float)
    for event in events:
        if event["name"] == "collect events":
            fetching[event["pid"]] += event["dur"]
    steps = [event["dur"] for event in events if event.get("cat") == "phase" and event["name"] == "step"]
    print(f"{len(steps)} steps of {sum(steps) / len(steps) / 1e6:.2f} s on average")
    print(f"{'process':<18}{'events a step':>14}{'share of a step':>18}")
    for pid, name in sorted(names.items()):
        cost = counts[pid] * recorded + fetching[pid]
        print(f"{name:<18}{counts[pid] / len(steps):>14.0f}{cost / sum(steps):>18.2%}")


if __name__ == "__main__":
    main()
