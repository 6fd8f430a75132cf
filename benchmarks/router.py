"""How busy the router keeps replicas: utilization with skewed lengths, beside requests that are split up beforehand.

    python benchmarks/router.py

Replicas are null engines: each has so many places, every request in a place gets one token per step, a step takes a
fixed time, and nothing is computed. Lengths are log-normal (median 256, sigma 1, at most 4,096); the samples of a
prompt share a key. ``split`` deals out prompts in turn, as many to each replica, each of which then works through its
own queue; ``router`` knows no length beforehand and learns from one sample of each prompt how long the others are;
``expected`` is told a length of each prompt that is off by a factor of 1.5 or so, as the last epoch's would be.

``utilization`` is the share of the wall time that a replica had something to do, mean over replicas; ``places`` that of
all places; ``limit`` is what ``places`` could be at most, since no answer ends before its own length; ``overhead`` is
wall time over the steps of the replica that took most.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from megarl.rollout import Completion, Request, SamplingParams
from megarl.rollout.router import Router

REPLICAS, PLACES, SAMPLES = 4, 64, 4
LONGEST = 4096


class Asked(NamedTuple):
    """A request: its prompt's name, how long the answer is, and how long it is thought to be."""

    key: str
    length: int
    expected: float


class NullReplica:
    """Answers a request of seed ``s`` after ``s`` steps."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._waiting: list[Request] = []
        self._left: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self.steps = self.tokens = 0

    async def exchange(self, requests: Sequence[Request], aborted: Sequence[str], slice_s: float) -> list[Completion]:
        """Steps until something ends."""
        self._waiting += requests
        done: list[Completion] = []
        begin = time.perf_counter()
        while not done and (self._left or self._waiting) and time.perf_counter() - begin < slice_s:
            while self._waiting and len(self._left) < PLACES:
                request = self._waiting.pop(0)
                self._left[request.request_id] = self._asked[request.request_id] = request.seed
            # As many steps as pass before the first one ends, or the slice does.
            steps = min(*self._left.values(), max(1, int(slice_s / self._step_s)), LONGEST)
            await asyncio.sleep(steps * self._step_s)
            self.steps += steps
            self.tokens += steps * len(self._left)
            self._left = {name: left - steps for name, left in self._left.items()}
            ended = [name for name, left in self._left.items() if left == 0]
            done = [Completion(name, [0] * self._asked[name], [0.0] * self._asked[name], "stop", 0) for name in ended]
            self._left = {name: left for name, left in self._left.items() if left}
        return done


async def ask(replicas: Sequence[NullReplica], requests: Sequence[Asked], capacity: int, expect: bool = False) -> None:
    """Lets a router have all requests answered."""
    params = SamplingParams(LONGEST)
    async with Router(replicas, capacity, 600.0) as router:
        await asyncio.gather(
            *(
                router.generate(
                    [0], params, seed=one.length, key=one.key, expected_tokens=one.expected if expect else None
                )
                for one in requests
            )
        )


async def routed(replicas: Sequence[NullReplica], requests: Sequence[Asked]) -> None:
    """As a job does it."""
    await ask(replicas, requests, PLACES + PLACES // 8)


async def expected(replicas: Sequence[NullReplica], requests: Sequence[Asked]) -> None:
    """The same with expectations."""
    await ask(replicas, requests, PLACES + PLACES // 8, expect=True)


async def split(replicas: Sequence[NullReplica], requests: Sequence[Asked]) -> None:
    """Prompts dealt out beforehand."""
    parts = [
        [request for number, request in enumerate(requests) if number // SAMPLES % len(replicas) == rank]
        for rank in range(len(replicas))
    ]
    await asyncio.gather(*(ask([replica], part, len(part)) for replica, part in zip(replicas, parts, strict=True)))


def draw_requests(seed: int, prompts: int) -> list[Asked]:
    """Answers to one prompt have alike lengths."""
    rng = random.Random(seed)
    requests = []
    for prompt in range(prompts):
        typical = 256 * rng.lognormvariate(0, 0.9)
        thought = typical * rng.lognormvariate(0, 0.4)
        for _ in range(SAMPLES):
            length = min(LONGEST, max(1, round(typical * rng.lognormvariate(0, 0.43))))
            requests.append(Asked(str(prompt), length, thought))
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print(f"{REPLICAS} null replicas of {PLACES} places, {args.prompts} prompts x {SAMPLES}, {args.step_ms} ms a step")
    print(f"{'seed':<6}{'how':<10}{'utilization':>12}{'places':>8}{'limit':>8}{'wall s':>8}{'overhead':>10}")
    for seed in range(args.seeds):
        requests = draw_requests(seed, args.prompts)
        lengths = [request.length for request in requests]
        for name, way in (("split", split), ("router", routed), ("expected", expected)):
            replicas = [NullReplica(args.step_ms / 1000) for _ in range(REPLICAS)]
            begin = time.perf_counter()
            asyncio.run(way(replicas, requests))
            wall = time.perf_counter() - begin
            most = max(replica.steps for replica in replicas)
            assert sum(replica.tokens for replica in replicas) == sum(lengths)
            busy = sum(replica.steps for replica in replicas) / (REPLICAS * most)
            places = sum(lengths) / (REPLICAS * PLACES * most)
            overhead = wall / (most * args.step_ms / 1000)
            limit = min(1.0, sum(lengths) / (REPLICAS * PLACES * max(lengths)))
            print(
                f"{seed:<6}{name:<10}{busy:>12.1%}{places:>8.1%}{limit:>8.1%}{wall:>8.1f}{overhead:>10.2f}", flush=True
            )


if __name__ == "__main__":
    main()
