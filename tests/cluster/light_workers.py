"""Worker classes for the cluster tests without heavy imports, so that their processes start fast."""

import os
import sys
import time
from pathlib import Path

from megarl.base.errors import WorkerLost
from megarl.base.image_tokens import image_key
from megarl.rollout.interface import Completion
from megarl.rollout.serving import EngineServer, HeldRequests
from megarl.sharding.plan import TransferUsage
from megarl.sharding.verification import PartialChecksum
from megarl.workers.dispatch import Dispatch, verb


class Sleeper:
    """Sleeps, so that it can be killed, or fails in its constructor."""

    def __init__(self, place, fail_on_rank=None):
        if place.rank == fail_on_rank:
            raise FileNotFoundError("shard 3 is missing")
        if fail_on_rank is not None:
            time.sleep(600)  # as one that waits for a peer that never comes

    @verb(Dispatch.ALL)
    def sleep(self, seconds):
        time.sleep(seconds)

    @verb(Dispatch.ALL)
    def wait_for(self, file):
        while not Path(file).exists():
            time.sleep(0.01)

    @verb(Dispatch.ALL)
    def pid(self):
        return os.getpid()

    @verb(Dispatch.ALL)
    def gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

    @verb(Dispatch.ALL)
    def variables(self, names):
        return {name: os.environ[name] for name in names}

    @verb(Dispatch.ALL)
    def leave(self):
        print("the last words of this process", file=sys.stderr, flush=True)
        os._exit(3)

    @verb(Dispatch.ALL)
    def lose_peer(self, peer):
        """Wait until the peer process has died; then raise like a collective call."""
        while peer != os.getpid():
            time.sleep(0.01)
            try:
                os.kill(peer, 0)
            except ProcessLookupError:
                raise ConnectionResetError("connection reset by peer") from None
        time.sleep(600)

    @verb(Dispatch.ALL)
    def loaded(self, module):
        return module in sys.modules


class Shadowing(Sleeper):
    """Has a verb with the name of a group's method."""

    @verb(Dispatch.ALL)
    def submit(self):
        return None


class Trainer:
    """Source of a weight sync: packs one number per destination."""

    def __init__(self, place, destinations, fail_at=None, only=None):
        """``only``: destination of each bucket; None = all."""
        self.rank, self.destinations, self.fail_at, self.only = place.rank, destinations, fail_at, only
        self.packed = set()

    @verb(Dispatch.ALL)
    def export_bucket(self, index):
        if (self.rank, index) == self.fail_at:
            raise MemoryError("no shared memory for 12 bytes")
        self.packed = {earlier for earlier in self.packed if earlier > index - 2} | {index}
        # rank 1 has nothing for destination 0
        destinations = range(self.destinations) if self.only is None else [self.only[index]]
        return {to: 100 * index + 10 * self.rank + to for to in destinations if to >= self.rank}

    @verb(Dispatch.ALL)
    def export_nowhere(self):
        return {self.destinations: "lost"}

    @verb(Dispatch.ALL)
    def make_room(self):
        return None

    @verb(Dispatch.ALL)
    def open_transfer(self, session):
        return None

    @verb(Dispatch.ALL)
    def weight_shares(self):
        return {f"w{self.rank}": PartialChecksum(self.rank, 1)}

    @verb(Dispatch.ALL)
    def close_transfer(self, completed):
        self.packed.clear()
        return TransferUsage(100 + self.rank)

    @verb(Dispatch.ALL)
    def still_packed(self):
        return sorted(self.packed)


class Engine:
    """Target of a weight sync: records the messages that it receives."""

    def __init__(self, place, ranks=1, fail_at=None):
        """``fail_at``: rank, bucket, and whether the process dies; otherwise it raises."""
        self.rank, self.ranks, self.events, self.fail_at = place.rank, ranks, [], fail_at

    @verb(Dispatch.ALL)
    def pid(self):
        return os.getpid()

    @verb(Dispatch.ALL)
    def pause(self):
        self.events.append(("pause",))
        return HeldRequests(1, 10)

    @verb(Dispatch.ALL)
    def resume(self):
        self.events.append(("resume",))

    @verb(Dispatch.ALL)
    def begin_update(self, version):
        self.events.append(("begin", version))

    @verb(Dispatch.ALL)
    def import_bucket(self, index, messages):
        if self.fail_at is not None and self.fail_at[:2] == (self.rank, index):
            if self.fail_at[2]:
                os._exit(3)
            raise MemoryError("no memory for the bucket")
        self.events.append((index, list(messages)))

    @verb(Dispatch.ALL)
    def end_update(self, version):
        self.events.append(("end", version))

    @verb(Dispatch.ALL)
    def sleep(self, tags):
        self.events.append(("sleep", *tags))

    @verb(Dispatch.ALL)
    def wake(self, tags):
        self.events.append(("wake", *tags))

    @verb(Dispatch.ALL)
    def open_transfer(self, session):
        self.events.append(("open", session))

    @verb(Dispatch.ALL)
    def weight_shares(self):
        return [{"w0": PartialChecksum(0, 1), "w1": PartialChecksum(1, 1)}] * self.ranks

    @verb(Dispatch.ALL)
    def close_transfer(self, completed):
        self.events.append(("close", completed))
        return [TransferUsage(2**20)]

    @verb(Dispatch.ALL)
    def seen(self):
        events, self.events = self.events, []
        return events


class Answerer:
    """A replica that fails independently of the others."""

    def __init__(self, place):
        self.rank = place.rank
        self.ready = False
        self.requests = []

    @verb(Dispatch.ALL)
    def init_model(self):
        self.ready = True
        return os.getpid()

    @verb(Dispatch.RANK)
    def accept(self, client, requests, aborted):
        if "die" in requests:
            os._exit(1)
        if "raise" in requests:
            raise ValueError("not finite")
        if "lose" in requests:
            raise WorkerLost("a process of the engine has ended", code="sglang.engine-lost")
        self.requests = requests

    @verb(Dispatch.RANK)
    def completions(self, client, wait_s):
        deadline = time.monotonic() + wait_s
        while not self.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        requests, self.requests = self.requests, []
        return [(self.rank, self.ready, *requests)]


class TimedEngine:
    """An engine whose requests take a while; the tokens depend on prompt and seed only."""

    def __init__(self, seconds):
        self.seconds, self.running, self.held = seconds, {}, False

    def interrupt_poll(self):
        pass

    def can_continue(self, request):
        return True

    def submit(self, requests):
        ends = time.monotonic() + self.seconds
        for number, request in enumerate(requests):
            self.running[request.request_id] = (request, ends + 0.01 * number)

    def abort(self, names):
        for name in set(names) & self.running.keys():
            self.running[name] = (None, 0.0)

    def poll(self, timeout_s):
        time.sleep(0.005)
        now, done = time.monotonic(), []
        for name, (request, ends) in list(self.running.items()):
            if now >= ends and not (self.held and request):
                del self.running[name]
                tokens = [] if request is None else timed_tokens(request.prompt_ids, request.seed)
                done.append(Completion(name, tokens, [-1.0] * len(tokens), "stop" if tokens else "abort", 1))
        return done


def timed_tokens(prompt_ids, seed):
    return [sum(prompt_ids) % 7, seed % 5, seed % 3]


class TimedReplica:
    """A replica with a timed engine."""

    def __init__(self, place, seconds):
        self.engine = TimedEngine(seconds)
        self.server = EngineServer(self.engine)
        self.clients, self.digests = set(), {}

    @verb(Dispatch.RANK)
    def accept(self, client, requests, aborted):
        self.clients.add(client)
        self.digests |= {image.key: image_key(image.data) for request in requests for image in request.images}
        self.server.accept(client, requests, aborted)

    @verb(Dispatch.RANK)
    def completions(self, client, wait_s):
        return self.server.completions(client, wait_s)

    @verb(Dispatch.RANK)
    def forget(self, client):
        self.server.forget(client)

    @verb(Dispatch.ALL)
    def hold(self, held):
        """Let no request end, or let them end as usual."""
        self.engine.held = held

    @verb(Dispatch.ALL)
    def state(self):
        return len(self.engine.running), len(self.clients)

    @verb(Dispatch.ALL)
    def seen_digests(self):
        """Digests of the images' files, by the images' keys."""
        return self.digests
