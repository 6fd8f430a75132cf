"""Utilization of replicas by the router with skewed lengths, against requests divided in advance.

    python benchmarks/router.py

Replicas are null engines with a number of slots ("places"). Every running request gets one token per step, a step takes
a fixed time, and nothing is computed. Lengths are log-normal (median 256, sigma 1, at most 4,096); samples of a prompt
share a key. ``split`` divides the prompts evenly over the replicas in advance; each replica works through its queue.
``router`` knows no lengths in advance, and predicts them from one sample of each prompt.

``utilization`` is the busy share of a replica's wall time, as the mean over replicas. ``places`` is the busy share of
all slots. ``limit`` is the maximum of ``places``, since no response ends before its length. ``overhead`` is wall time
over the steps of the slowest replica.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from machine import benchmark_parser, parse_sizes

from megarl.rollout import Completion, Request, SamplingParams
from megarl.rollout.router import Router

REPLICAS, PLACES, SAMPLES = 4, 64, 4
LONGEST = 4096
SLICE_S = 0.1
"""Longest sleep of a null replica, after which it looks for new requests."""


class DrawnRequest(NamedTuple):
    """A request: prompt name and response length."""

    key: str
    length: int


class NullReplica:
    """Answers a request of seed ``s`` after ``s`` steps."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._waiting: list[Request] = []
        self._left: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self.steps = self.tokens = 0

    async def accept(self, client: str, requests: Sequence[Request], aborted: Sequence[str]) -> None:
        """Take new requests."""
        self._waiting += requests

    async def completions(self, client: str, wait_s: float) -> list[Completion]:
        """Run steps until a request ends."""
        done: list[Completion] = []
        begin = time.perf_counter()
        while not done and (self._left or self._waiting) and time.perf_counter() - begin < wait_s:
            while self._waiting and len(self._left) < PLACES:
                request = self._waiting.pop(0)
                self._left[request.request_id] = self._asked[request.request_id] = request.seed
            # All steps until the first request ends, or a new one could come.
            steps = min(*self._left.values(), max(1, int(SLICE_S / self._step_s)), LONGEST)
            await asyncio.sleep(steps * self._step_s)
            self.steps += steps
            self.tokens += steps * len(self._left)
            self._left = {name: left - steps for name, left in self._left.items()}
            ended = [name for name, left in self._left.items() if left == 0]
            done = [Completion(name, [0] * self._asked[name], [0.0] * self._asked[name], "stop", 0) for name in ended]
            self._left = {name: left for name, left in self._left.items() if left}
        return done


async def ask(replicas: Sequence[NullReplica], requests: Sequence[DrawnRequest], capacity: int) -> None:
    """Send all requests through a router."""
    params = SamplingParams(LONGEST)
    async with Router(dict(enumerate(replicas)), capacity, 600.0) as router:
        await asyncio.gather(*(router.generate([0], params, seed=one.length, key=one.key) for one in requests))


async def routed(replicas: Sequence[NullReplica], requests: Sequence[DrawnRequest]) -> None:
    """Route as a training job does."""
    await ask(replicas, requests, PLACES + PLACES // 8)


async def split(replicas: Sequence[NullReplica], requests: Sequence[DrawnRequest]) -> None:
    """Divide the prompts in advance."""
    parts = [
        [request for number, request in enumerate(requests) if number // SAMPLES % len(replicas) == rank]
        for rank in range(len(replicas))
    ]
    await asyncio.gather(*(ask([replica], part, len(part)) for replica, part in zip(replicas, parts, strict=True)))


def draw_requests(seed: int, prompts: int) -> list[DrawnRequest]:
    """Draw requests; samples of one prompt have similar lengths."""
    rng = random.Random(seed)
    requests = []
    for prompt in range(prompts):
        typical = 256 * rng.lognormvariate(0, 0.9)
        for _ in range(SAMPLES):
            length = min(LONGEST, max(1, round(typical * rng.lognormvariate(0, 0.43))))
            requests.append(DrawnRequest(str(prompt), length))
    return requests


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=3)
    args = parse_sizes(parser, prompts=8, step_ms=0.1, seeds=1)
    print(f"{REPLICAS} null replicas of {PLACES} places, {args.prompts} prompts x {SAMPLES}, {args.step_ms} ms a step")
    print(f"{'seed':<6}{'how':<10}{'utilization':>12}{'places':>8}{'limit':>8}{'wall s':>8}{'overhead':>10}")
    for seed in range(args.seeds):
        requests = draw_requests(seed, args.prompts)
        lengths = [request.length for request in requests]
        for name, way in (("split", split), ("router", routed)):
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
