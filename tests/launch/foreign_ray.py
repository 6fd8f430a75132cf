"""Somebody else's Ray: starts, waits for a line, then computes and ends."""

import sys

import ray

from megarl.cluster import RaySession

with RaySession(num_cpus=1):
    print("up", flush=True)
    sys.stdin.readline()
    print(ray.get(ray.remote(lambda: 1 + 2).remote()), flush=True)
