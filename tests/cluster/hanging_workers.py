"""Worker classes that hang, for the timeline and watchdog tests."""

import ctypes
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.rollout.serving import EngineServer
from megarl.workers.dispatch import Dispatch, verb


def hang(how):
    if how == "user code":
        time.sleep(600)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1.0)  # another thread may take the signal, and this one continues until all threads are stopped
    elif how == "holds Python's lock":
        libc, semaphore = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        libc.sem_init(semaphore, 0, 0)
        libc.sem_wait(semaphore)


class Hanging:
    """Three ranks that sum numbers until one of them stops."""

    def __init__(self, place):
        self.rank = place.rank
        store = dist.TCPStore(*place[2:], place.world_size, is_master=self.rank == 0, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=place.world_size)

    @verb(Dispatch.ALL, phase="update_actor")
    def update(self, steps, late=None, how=""):
        for _ in range(steps):
            dist.all_reduce(torch.ones(1))
        if self.rank == late:
            hang(how)
        if late is not None:
            dist.all_reduce(torch.ones(1))

    @verb(Dispatch.ALL)
    def total(self, value):
        tensor = torch.tensor([float(value + self.rank)])
        dist.all_reduce(tensor)
        return tensor.item()

    @verb(Dispatch.RANK)
    def accept(self, client, requests, aborted):
        self.server = EngineServer(HangingEngine())
        self.server.accept(client, requests, aborted)

    @verb(Dispatch.RANK)
    def completions(self, client, wait_s):
        return self.server.completions(client, wait_s)


class HangingEngine:
    """An engine that hangs with its first request."""

    def interrupt_poll(self):
        pass

    def submit(self, requests):
        pass

    def abort(self, request_ids):
        pass

    def poll(self, timeout_s):
        hang("user code")
