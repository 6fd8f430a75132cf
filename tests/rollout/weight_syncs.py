"""Weight syncs from this process into one engine, over the real plan, senders and transports."""

import threading

import torch

from megarl.models import ParallelLayout, WeightMap
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.rollout.registry import engine_vocab_multiple
from megarl.sharding.placement import RolloutLayout, Routes, current_location
from megarl.sharding.plan import build_plan, receiver_plans
from megarl.sharding.receiver import ReceiverSpec
from megarl.sharding.sender import BucketSender, destination_ranks
from megarl.sharding.transports.interface import PeerTransports, StoreAddress

LAYOUT, CPU = ParallelLayout(), torch.device("cpu")


def vocab_multiple(engine):
    return engine_vocab_multiple("sglang" if hasattr(engine, "url") else "embedded")


def rank_params(engine):
    """Parameters of each of the engine's ranks."""
    weight_map, tp = WeightMap(engine.config), engine.options.tensor_parallel_size
    return [weight_map.rollout_params(tp, rank, vocab_multiple=vocab_multiple(engine)) for rank in range(tp)]


class WeightSync:
    """A trainer of one rank, in this process, that holds a folder's weights in float32, connected to an engine."""

    def __init__(self, engine, folder, transport="auto", bucket_bytes=5000, store=None):
        reader, weight_map = HFReader(folder), WeightMap(engine.config)
        self.tensors = dict(load_local(reader, weight_map.megatron_params(LAYOUT, 0), torch.float32))
        layout = RolloutLayout(engine.options.tensor_parallel_size, vocab_multiple=vocab_multiple(engine))
        self.engine, self.plan = engine, build_plan(weight_map, LAYOUT, layout, bucket_bytes, 4)
        routes = Routes([current_location()], engine.receiver.locations, transport)
        address = None if store is None else StoreAddress("127.0.0.1", store.port, 60.0)
        peers = PeerTransports.for_sender(routes, 0, destination_ranks(self.plan.sent_by(0)), CPU, address)
        self.sender = BucketSender(self.plan, 0, lambda: self.tensors, peers, torch.float32, CPU)
        engine.receiver.connect([ReceiverSpec(part, routes, address, "float32") for part in receiver_plans(self.plan)])

    def begin(self, version):
        self.engine.receiver.begin(version)
        joining = threading.Thread(target=self.sender.peers.open, args=(0,))
        joining.start()
        self.engine.receiver.open(0)
        joining.join()

    def send(self, buckets=None):
        """Send some buckets, or all of them."""
        for index in range(len(self.plan.buckets)) if buckets is None else buckets:
            messages = list(self.sender.export_bucket(index).values())
            try:
                self.engine.receiver.import_bucket(index, messages)
            except BaseException:
                self.sender.close(completed=False)  # as the manager does after a failure
                raise

    def close(self, completed=True):
        self.sent = self.sender.close(completed)
        return self.engine.receiver.close(completed)

    def run(self, version):
        """A whole sync; returns the memory of each receiving process."""
        self.begin(version)
        self.send()
        usage = self.close()
        self.engine.receiver.end(version)
        return usage


def update(engine, folder, version, **options):
    """A single sync; see :meth:`WeightSync.run`."""
    return WeightSync(engine, folder, **options).run(version)
