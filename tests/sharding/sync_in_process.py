"""Both sides of a weight sync in one process, led by the real manager.

A thread represents a process: one per training rank and one per replica.
"""

import copy
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import torch
from resharding_cases import box, labelled_checkpoint, rollout_tensors, training_tensors

from megarl.base.rendezvous import host_store
from megarl.rollout.serving import HeldRequests
from megarl.sharding import ProcessLocation, RolloutLayout, Routes, ShardingManager, SyncOptions, build_plan
from megarl.sharding.placement import current_location
from megarl.sharding.receiver import BucketReceiver, largest_bucket, route_messages, source_ranks
from megarl.sharding.sender import BucketSender, destination_ranks
from megarl.sharding.transports.interface import PeerTransports, StoreAddress
from megarl.sharding.verification import partial_checksums

CPU = torch.device("cpu")
KEPT = []
"""TCP stores, which must outlive their process groups."""


class Engine:
    """The weights of an engine on one rank."""

    peak_bytes = 0

    def __init__(self, weights):
        self.weights = {name: torch.zeros_like(t) for name, t in weights.items()}
        self.version, self.stale = 0, False

    def begin(self, version):
        self.stale = True

    def write(self, slices):
        for name, start, values in slices:
            self.weights[name][box(start, values.shape)].copy_(values)

    def end(self, version):
        self.version, self.stale = version, False


class Together:
    """Futures of several ranks as one."""

    def __init__(self, futures):
        self.futures = futures

    def result(self, timeout_s=None):
        return [future.result(timeout_s) for future in self.futures]


class Side:
    """Ranks with a thread each; a call that starts with ``fail_at`` raises on the last rank."""

    def __init__(self, count, log):
        self.threads = [ThreadPoolExecutor(1) for _ in range(count)]
        self.ranks_of_calls, self.seen = range(count), defaultdict(list)
        self.log, self.fail_at = log, None

    def run(self, verb, function, *arguments):
        """``function(rank, *arguments)`` on every rank."""

        def call(rank):
            begins = self.fail_at is not None and (verb, *arguments)[: len(self.fail_at)] == self.fail_at
            if begins and rank == len(self.threads) - 1:
                raise RuntimeError("lost rank")
            result = function(rank, *arguments)
            self.seen[rank].append((verb, *arguments))
            if rank == 0:
                self.log.append((verb, *arguments))
            return result

        return Together([self.threads[rank].submit(call, rank) for rank in self.ranks_of_calls])

    def settle(self):
        """Wait for all submitted calls."""
        Together([thread.submit(int) for thread in self.threads]).result()


class Source(Side):
    """All training ranks."""

    def __init__(self, setup, routes, address):
        super().__init__(setup.train.world_size, setup.log)
        self.setup, self.ranks = setup, setup.trainer(0)

        def sender(rank):
            peers = PeerTransports.for_sender(routes, rank, destination_ranks(setup.plan.sent_by(rank)), CPU, address)
            return BucketSender(setup.plan, rank, lambda: self.ranks[rank], peers, setup.dtype, CPU)

        self.senders = [sender(rank) for rank in range(len(self.ranks))]

    def make_room(self):
        return self.run("make_room", lambda rank: None)

    def open_transfer(self, session):
        return self.run("open source", lambda rank, session: self.senders[rank].open(session), session)

    def export_bucket(self, index):
        return self.run("export", lambda rank, index: self.senders[rank].export_bucket(index), index)

    def close_transfer(self, completed):
        return self.run("close source", lambda rank, completed: self.senders[rank].close(completed), completed)

    def checksums(self):
        def shares(rank):
            params = self.setup.weight_map.export_params(self.setup.train, rank)
            kept = self.setup.plan.float32_params
            return partial_checksums(params, self.ranks[rank], self.setup.dtype, kept, convert=True)

        return self.run("checksums of source", shares)

    def lent(self):
        """Number of buffers in use."""
        self.settle()
        return sum(len(pool._lent) for sender in self.senders for pool in sender.pools.values())


class Target(Side):
    """All rollout ranks."""

    def __init__(self, setup, routes, address):
        self.engines = [Engine(w) for w in setup.expected(0)]
        super().__init__(len(self.engines), setup.log)
        self.setup = setup

        def receiver(rank, engine):
            buckets = setup.plan.received_by(rank)
            size = largest_bucket(buckets, setup.dtype, setup.plan.float32_params)
            peers = PeerTransports.for_receiver(routes, rank, source_ranks(buckets), CPU, address, size)
            return BucketReceiver(setup.plan, rank, engine, peers, setup.dtype)

        self.receivers = [receiver(rank, engine) for rank, engine in enumerate(self.engines)]

    @property
    def numbers(self):
        return [rank // self.setup.tp for rank in self.ranks_of_calls][:: self.setup.tp]

    def of_replicas(self, replicas):
        part, tp = copy.copy(self), self.setup.tp
        part.ranks_of_calls = range(replicas.start * tp, replicas.stop * tp)
        return part

    def pause(self):
        return self.run("pause", lambda rank: HeldRequests(rank, 10 * rank))

    def resume(self):
        return self.run("resume", lambda rank: None)

    def sleep(self, tags):
        return self.run("sleep", lambda rank, *tags: None, *tags)

    def wake(self, tags):
        return self.run("wake", lambda rank, *tags: None, *tags)

    def begin_update(self, version):
        return self.run("begin_update", lambda rank, version: self.receivers[rank].begin(version), version)

    def open_transfer(self, session):
        return self.run("open target", lambda rank, session: self.receivers[rank].open(session), session)

    def import_bucket(self, index, exported):
        def write(rank, index):
            messages = [message for export in exported.result() for message in export.values()]
            self.receivers[rank].import_bucket(index, route_messages(messages, range(len(self.engines)))[rank])

        return self.run("import", write, index)

    def close_transfer(self, completed):
        return self.run("close target", lambda rank, completed: self.receivers[rank].close(completed), completed)

    def checksums(self):
        def share(rank):
            kept, dtype = self.setup.plan.float32_params, self.setup.dtype
            params = self.setup.rollout_params(rank)
            return partial_checksums(params, self.engines[rank].weights, dtype, kept, convert=False)

        return self.run("checksums of target", share)

    def end_update(self, version):
        return self.run("end_update", lambda rank, version: self.receivers[rank].end(version), version)


class Setup:
    """A model between a trainer and engines."""

    def __init__(
        self,
        weight_map,
        train,
        tp,
        replicas,
        transport="inline",
        bucket=400,
        dtype=torch.float32,
        ep=1,
        held=None,
        places=None,
        wave=None,
        **options,
    ):
        self.weight_map, self.train, self.dtype, self.log = weight_map, train, dtype, []
        self.held = held or dtype  # by the trainer; sent and held by the engines is ``dtype``
        self.tp, self.ep, self.replicas = tp, ep, replicas
        layout = RolloutLayout(tp, ep, replicas)
        self.plan = build_plan(weight_map, train, layout, bucket, dtype.itemsize, wave_replicas=wave)
        train_places, rollout_places = places or (
            [current_location()] * train.world_size,
            [current_location()] * tp * replicas,
        )
        routes = Routes(train_places, rollout_places, transport)
        address = None
        if routes.needs_rendezvous():
            KEPT.append(host_store("127.0.0.1"))
            address = StoreAddress("127.0.0.1", KEPT[-1].port)
        self.source, self.target = Source(self, routes, address), Target(self, routes, address)
        self.engines = self.target.engines
        self.manager = ShardingManager(
            self.plan,
            self.source,
            self.target,
            SyncOptions(**{"replica_size": tp, **options}),
        )

    def rollout_params(self, rank):
        return self.weight_map.rollout_params(self.tp, rank % self.tp, self.ep)

    def checkpoint(self, step):
        return {n: t + step for n, t in labelled_checkpoint(self.weight_map, self.held).items()}

    def trainer(self, step):
        return training_tensors(self.weight_map, self.train, self.checkpoint(step))

    def expected(self, step):
        ranks = rollout_tensors(self.weight_map, self.tp, self.replicas, self.checkpoint(step), ep=self.ep)
        kept = self.plan.float32_params
        return [{name: t if name in kept else t.to(self.dtype) for name, t in rank.items()} for rank in ranks]

    def assert_engines_hold(self, step):
        for engine, expected in zip(self.engines, self.expected(step), strict=True):
            assert engine.weights.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(engine.weights[name], tensor), name

    def close(self):
        for side in (self.source, self.target):
            for thread in side.threads:
                thread.shutdown()


def two_nodes(train, rollout):
    """Locations of training and rollout ranks on two nodes, in turn."""
    return tuple([ProcessLocation(f"node {rank % 2}") for rank in range(count)] for count in (train, rollout))
