"""Both sides of a weight sync in one process, led by the real manager.

A thread represents a process: one per training rank, one per replica and one per rank of it.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from resharding_cases import box, labelled_checkpoint, rollout_tensors, training_tensors
from support.local_group import LocalGroup, Together

from megarl.base.rendezvous import host_store
from megarl.cluster.sharding_manager import ShardingManager, SyncOptions
from megarl.rollout.serving import HeldRequests
from megarl.sharding.placement import ProcessLocation, RolloutLayout, Routes, current_location
from megarl.sharding.plan import build_plan
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


class TrainingRank:
    """A training rank: a sender, and the verbs of an actor."""

    def __init__(self, setup, rank, peers):
        self.setup, self.rank = setup, rank
        self.sender = BucketSender(setup.plan, rank, lambda: setup.trained[rank], peers, setup.dtype, CPU)

    def make_room(self):
        pass

    def open_transfer(self, session):
        self.sender.peers.open(session)

    def export_bucket(self, index):
        return self.sender.export_bucket(index)

    def close_transfer(self, completed):
        return self.sender.close(completed)

    def weight_shares(self):
        setup = self.setup
        params = setup.weight_map.export_params(setup.train, self.rank)
        return partial_checksums(params, setup.trained[self.rank], setup.dtype, setup.plan.float32_params, convert=True)


class Replica:
    """All ranks of a replica, with a receiver and a thread each, and the verbs of a rollout worker."""

    def __init__(self, setup, number, receivers):
        self.setup, self.number, self.receivers = setup, number, receivers
        self.threads = [ThreadPoolExecutor(1) for _ in receivers]

    def run(self, method, *arguments):
        """The method of every rank's receiver, at the same time."""
        calls = zip(self.threads, self.receivers, strict=True)
        return Together([thread.submit(getattr(receiver, method), *arguments) for thread, receiver in calls]).result()

    def pause(self):
        return HeldRequests(self.number, 10 * self.number)

    def resume(self):
        pass

    def sleep(self, tags):
        pass

    def wake(self, tags):
        pass

    def begin_update(self, version):
        self.run("begin", version)

    def open_transfer(self, session):
        calls = zip(self.threads, self.receivers, strict=True)
        Together([thread.submit(receiver.peers.open, session) for thread, receiver in calls]).result()

    def import_bucket(self, index, messages):
        own = route_messages(messages, [receiver.rank for receiver in self.receivers])
        calls = zip(self.threads, self.receivers, own, strict=True)
        Together([thread.submit(rank.import_bucket, index, part) for thread, rank, part in calls]).result()

    def close_transfer(self, completed):
        return self.run("close", completed)

    def weight_shares(self):
        kept, dtype, setup = self.setup.plan.float32_params, self.setup.dtype, self.setup
        return [
            partial_checksums(
                setup.rollout_params(rank.rank), setup.engines[rank.rank].weights, dtype, kept, convert=False
            )
            for rank in self.receivers
        ]

    def end_update(self, version):
        self.run("end", version)

    def close(self):
        for thread in self.threads:
            thread.shutdown()


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
        self.trained = self.trainer(0)
        self.engines = [Engine(weights) for weights in self.expected(0)]

        def sender_peers(rank):
            return PeerTransports.for_sender(routes, rank, destination_ranks(self.plan.sent_by(rank)), CPU, address)

        def receiver(rank, engine):
            buckets = self.plan.received_by(rank)
            size = largest_bucket(buckets, dtype, self.plan.float32_params)
            peers = PeerTransports.for_receiver(routes, rank, source_ranks(buckets), CPU, address, size)
            return BucketReceiver(self.plan, rank, engine, peers, dtype)

        ranks = [TrainingRank(self, rank, sender_peers(rank)) for rank in range(train.world_size)]
        self.senders = [rank.sender for rank in ranks]
        self.receivers = [receiver(rank, engine) for rank, engine in enumerate(self.engines)]
        parts = [self.receivers[first : first + tp] for first in range(0, len(self.receivers), tp)]
        self.actor = LocalGroup("actor", ranks, self.log)
        workers = [Replica(self, number, part) for number, part in enumerate(parts)]
        self.rollout = LocalGroup("rollout", workers, self.log, tp)
        self.manager = ShardingManager(self.plan, self.actor, self.rollout, SyncOptions(**options))

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

    def buffers_in_use(self):
        self.actor.settle()
        return sum(len(pool._lent) for sender in self.senders for pool in sender.pools.values())

    def close(self):
        for part in (self.actor, self.rollout, *self.rollout.workers):
            part.close()


def two_nodes(train, rollout):
    """Locations of training and rollout ranks on two nodes, in turn."""
    return tuple([ProcessLocation(f"node {rank % 2}") for rank in range(count)] for count in (train, rollout))
