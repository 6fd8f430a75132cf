"""One replica of the rollout engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.config import RolloutConfig
from megarl.models import WeightMap, read_model_config
from megarl.own_module import import_own
from megarl.rollout import Completion, Request, create_engine
from megarl.rollout.exchange import exchange
from megarl.rollout.interface import Tag
from megarl.rollout.seal import Seal
from megarl.rollout.settings import engine_options
from megarl.sharding.links import Address, Links
from megarl.sharding.parts import PlanPart
from megarl.sharding.places import ProcessPlace, Routes, this_place
from megarl.sharding.receiver import BucketReceiver, ReplicaReceiver, Shipment, largest_bucket, sources
from megarl.sharding.verification import Share, shares_of
from megarl.workers.dispatch import Dispatch, verb
from megarl.workers.place import WorkerPlace
from megarl.workers.settings import RolloutSettings

SERVING = "while it served them"
"""When weights that were verified may have changed before the next update."""


class RolloutWorker:
    """Holds a replica's engine and lets the driver's router have it.

    Weights come from the actor, or from the model's folder where there is none.

    One process speaks for all tensor-parallel ranks of its replica: their shards are received here, and the engine
    brings each to the rank that it is of.

    Args:
        place: its rank is the replica's number; replicas do not meet each other.
        settings: what the replica is built from.
    """

    def __init__(self, place: WorkerPlace, *, settings: RolloutSettings) -> None:
        self.replica = place.rank
        self.settings = settings
        self._receiver: ReplicaReceiver
        import_own(*settings.external_lib)

    @verb(Dispatch.ALL)
    def init_model(self) -> None:
        """Build the engine, stale until the first weight sync."""
        settings: RolloutSettings = self.settings
        rollout: RolloutConfig = settings.config
        weights, tp = WeightMap(read_model_config(settings.model_path)), rollout.tensor_model_parallel_size
        self._params = [weights.rollout_params(tp, rank) for rank in range(tp)]
        options = engine_options(rollout, settings.device, self.replica)
        self._devices = [options.device_of(rank) for rank in range(tp)]
        self.engine = create_engine(rollout.name, settings.model_path, options)
        self._seal = Seal(self.engine)

    @verb(Dispatch.ALL)
    def load_hf(self) -> None:
        """Take the weights of the model's folder, where there is no actor to send any."""
        self.engine.load_hf(self.settings.model_path)

    @verb(Dispatch.RANK, phase="gen")
    def exchange(self, requests: Sequence[Request], aborted: Sequence[str], slice_s: float) -> list[Completion]:
        """Take new requests, give some up, work on what is under way; see :class:`megarl.rollout.router.Replica`."""
        return exchange(self.engine, requests, aborted, slice_s)

    @verb(Dispatch.ALL)
    def sync_places(self) -> list[ProcessPlace]:
        """Where the replica's ranks are, by which ways from the actor are chosen."""
        return [this_place(device) for device in self._devices]

    @verb(Dispatch.ALL)
    def connect_sync(self, parts: Sequence[PlanPart], routes: Routes, address: Address | None, dtype: str) -> None:
        """Get ready to receive weights by the parts of a plan, of which each of the replica's ranks has one."""
        sent: torch.dtype = getattr(torch, dtype)

        def receiver(rank: int, part: PlanPart) -> BucketReceiver:
            buckets = part.received_by(part.rank)
            size = largest_bucket(buckets, sent, part.float32_params)
            device = torch.device(self._devices[rank])
            links = Links.of_rollout(routes, part.rank, sources(buckets), device, address, size)
            return BucketReceiver(part, part.rank, self._params[rank], self.engine, links, sent)

        self._receiver = ReplicaReceiver(self.engine, [receiver(rank, part) for rank, part in enumerate(parts)])
        self._sent_as = sent, parts[0].float32_params

    @verb(Dispatch.ALL)
    def sleep(self, tags: Sequence[Tag]) -> None:
        """Free what the tags name for others on the device; the engine serves nothing."""
        if "weights" in tags:
            self._seal.break_up(SERVING)
        self.engine.sleep(tags)

    @verb(Dispatch.ALL)
    def wake(self, tags: Sequence[Tag]) -> None:
        """Take back the memory that :meth:`sleep` freed; weights come by the next sync."""
        self.engine.wake(tags)

    @verb(Dispatch.ALL, phase="update_weights")
    def begin_update(self, version: int) -> None:
        """From here on the engine is stale."""
        self._seal.break_up(SERVING)
        self._receiver.begin_update(version)

    @verb(Dispatch.ALL, phase="update_weights")
    def open_transfer(self, session: int) -> None:
        """Be ready to receive; meet the actor's ranks where the session is new."""
        self._receiver.open(session)

    @verb(Dispatch.ALL, phase="update_weights")
    def import_bucket(self, index: int, shipments: Sequence[Shipment | None]) -> None:
        """Write what the training ranks sent this replica's ranks in a bucket."""
        self._receiver.import_bucket(index, [shipment for shipment in shipments if shipment is not None])

    @verb(Dispatch.ALL, phase="update_weights")
    def weight_shares(self) -> list[dict[str, Share]]:
        """By rank of the replica, checksums of what it holds of every Hugging Face tensor, and shall go on to hold."""
        shares = [
            shares_of(params, self.engine.weights(rank), *self._sent_as, convert=False)
            for rank, params in enumerate(self._params)
        ]
        self._seal.put()
        return shares

    @verb(Dispatch.ALL, phase="update_weights")
    def close_transfer(self, completed: bool) -> int:
        """Nothing more is received; returns the peak bytes that receiving took in this process."""
        return self._receiver.close(completed)

    @verb(Dispatch.ALL, phase="update_weights")
    def end_update(self, version: int) -> None:
        """Serve the new weights, if all of them came."""
        self._receiver.end_update(version)
        self._seal.check("as the update ended")

    @verb(Dispatch.ALL)
    def weight_version(self) -> int:
        """Version of the weights that the engine serves."""
        return self.engine.weight_version

    @verb(Dispatch.ALL)
    def checksums(self) -> list[dict[str, str]]:
        """By rank of the replica, a digest of every parameter that it holds."""
        return [self.engine.checksum(rank) for rank in range(len(self._params))]
