"""One replica of the rollout engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.config import RolloutConfig
from megarl.models import WeightMap, read_model_config
from megarl.rollout import Completion, Request, create_engine
from megarl.rollout.exchange import exchange
from megarl.rollout.interface import Tag
from megarl.rollout.settings import engine_options
from megarl.sharding.links import Address, Links
from megarl.sharding.parts import PlanPart
from megarl.sharding.places import ProcessPlace, Routes, this_place
from megarl.sharding.receiver import BucketReceiver, Shipment, largest_bucket, sources
from megarl.sharding.verification import Share, shares_of
from megarl.workers.dispatch import Dispatch, verb
from megarl.workers.place import WorkerPlace
from megarl.workers.settings import RolloutSettings


class RolloutWorker:
    """Holds an engine and lets the driver's router have it. Weights come from the actor only.

    Args:
        place: its rank is ``replica * tensor parallel + tensor-parallel rank``; an engine of one process meets nobody.
        settings: what the replica is built from.
    """

    def __init__(self, place: WorkerPlace, *, settings: RolloutSettings) -> None:
        self.rank = place.rank
        self.settings = settings
        self._receiver: BucketReceiver

    @verb(Dispatch.ALL)
    def init_model(self) -> None:
        """Build the engine, stale until the first weight sync."""
        settings: RolloutSettings = self.settings
        rollout: RolloutConfig = settings.config
        self.model_config = read_model_config(settings.model_path)
        self.engine = create_engine(rollout.name, settings.model_path, engine_options(rollout, settings.device))

    @verb(Dispatch.RANK, phase="gen")
    def exchange(self, requests: Sequence[Request], aborted: Sequence[str], slice_s: float) -> list[Completion]:
        """Take new requests, give some up, work on what is under way; see :class:`megarl.rollout.router.Replica`."""
        return exchange(self.engine, requests, aborted, slice_s)

    @verb(Dispatch.ALL)
    def sync_place(self) -> ProcessPlace:
        """Where this process runs, by which ways from the actor are chosen."""
        return this_place(self.settings.device)

    @verb(Dispatch.ALL)
    def connect_sync(self, plan: PlanPart, routes: Routes, address: Address | None, dtype: str) -> None:
        """Get ready to receive weights by a plan, whose coverage of this engine is checked here."""
        buckets, sent = plan.received_by(self.rank), getattr(torch, dtype)
        size = largest_bucket(buckets, sent, plan.float32_params)
        device = torch.device(self.settings.device)
        links = Links.of_rollout(routes, self.rank, sources(buckets), device, address, size)
        self._params = WeightMap(self.model_config).rollout_params(tp=1, tp_rank=0)
        self._receiver = BucketReceiver(plan, self.rank, self._params, self.engine, links, sent)
        self._sent_as = sent, plan.float32_params

    @verb(Dispatch.ALL)
    def sleep(self, tags: Sequence[Tag]) -> None:
        """Free what the tags name for others on the device; the engine serves nothing."""
        self.engine.sleep(tags)

    @verb(Dispatch.ALL)
    def wake(self, tags: Sequence[Tag]) -> None:
        """Take back the memory that :meth:`sleep` freed; weights come by the next sync."""
        self.engine.wake(tags)

    @verb(Dispatch.ALL, phase="update_weights")
    def begin_update(self, version: int) -> None:
        """From here on the engine is stale."""
        self._receiver.begin_update(version)

    @verb(Dispatch.ALL, phase="update_weights")
    def open_transfer(self, session: int) -> None:
        """Be ready to receive; meet the actor's ranks where the session is new."""
        self._receiver.open(session)

    @verb(Dispatch.ALL, phase="update_weights")
    def import_bucket(self, index: int, shipments: Sequence[Shipment | None]) -> None:
        """Write what the training ranks sent this replica in a bucket."""
        self._receiver.import_bucket(index, [shipment for shipment in shipments if shipment is not None])

    @verb(Dispatch.ALL, phase="update_weights")
    def weight_shares(self) -> dict[str, Share]:
        """Checksums of what the engine holds of every Hugging Face tensor."""
        return shares_of(self._params, self.engine.weights(), *self._sent_as, convert=False)

    @verb(Dispatch.ALL, phase="update_weights")
    def close_transfer(self, completed: bool) -> int:
        """Nothing more is received; returns the peak bytes that receiving took on this rank."""
        return self._receiver.close(completed)

    @verb(Dispatch.ALL, phase="update_weights")
    def end_update(self, version: int) -> None:
        """Serve the new weights, if all of them came."""
        self._receiver.end_update(version)

    @verb(Dispatch.ALL)
    def weight_version(self) -> int:
        """Version of the weights that the engine serves."""
        return self.engine.weight_version

    @verb(Dispatch.ALL)
    def checksum(self) -> dict[str, str]:
        """Digest of every parameter of the engine."""
        return self.engine.checksum()
