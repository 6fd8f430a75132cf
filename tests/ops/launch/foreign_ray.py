"""Ray cluster of another user: start, wait for a line, compute, end."""

import sys

import ray

from megarl.cluster.session import RaySession

with RaySession(num_cpus=1):
    print("up", flush=True)
    sys.stdin.readline()
    print(ray.get(ray.remote(lambda: 1 + 2).remote()), flush=True)
