"""The rollout worker: one replica of the rollout engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.base.errors import WeightSyncError
from megarl.base.ports import held_port
from megarl.base.user_code import import_user_modules
from megarl.config import RolloutConfig
from megarl.config.schema.rollout import TrainingRolloutConfig
from megarl.models import WeightMap, read_model_config
from megarl.rollout import Completion, Request, RolloutEngine, create_engine
from megarl.rollout.interface import Tag
from megarl.rollout.registry import engine_vocab_multiple
from megarl.rollout.serving import EngineServer, HeldRequests
from megarl.rollout.settings import FRACTION, engine_options
from megarl.rollout.sglang.options import EngineNodes, SGLangOptions
from megarl.sharding.placement import ProcessLocation, Routes
from megarl.sharding.plan import RankPlan, TransferUsage
from megarl.sharding.receiver import ReceiverSpec
from megarl.sharding.sender import Message
from megarl.sharding.transports.interface import StoreAddress
from megarl.sharding.verification import PartialChecksum, checksums_by_name, weight_rectangles
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb
from megarl.workers.settings import RolloutSettings

SERVING = "while it served them"
"""The period, in errors, in which verified weights may have changed before the next update."""


class WeightFingerprint:
    """Detects changes of an engine's weights after their verification.

    Verification compares the written tensors. The fingerprint covers everything the engine holds, against any later
    change, at the cost of reading it once.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._recorded: tuple[str, ...] = ()

    def record(self) -> None:
        """Record the current fingerprint; a no-op for engines without fingerprints."""
        self._recorded = self._engine.fingerprint()

    def verify(self, when: str) -> None:
        """Compare the current fingerprint with the recorded one, if any.

        Raises:
            WeightSyncError: the weights have changed; names the first rank. The record is cleared.
        """
        if not self._recorded:
            return
        current = self._engine.fingerprint()
        changed = [rank for rank, (old, new) in enumerate(zip(self._recorded, current, strict=True)) if old != new]
        if changed:
            self._recorded = ()
            raise WeightSyncError(
                f"the engine's weights on its rank {changed[0]} were compared with the actor's and have changed "
                f"{when}, according to the engine's checksum",
                code="sync.weights-changed",
            )

    def verify_and_clear(self, when: str) -> None:
        """Compare a last time before the weights are replaced or freed, and clear the record; see :meth:`verify`."""
        self.verify(when)
        self._recorded = ()


class RolloutWorker:
    """Holds a replica's engine and serves the router's requests.

    Weights come from the actor, or from the model folder if there is no actor. One process represents all
    tensor-parallel ranks of its replica. It passes the commands of a weight sync on; the ranks receive the weights.

    Args:
        place: its rank is the replica's index; replicas need no rendezvous.
    """

    def __init__(self, place: WorkerPlace, *, settings: RolloutSettings) -> None:
        self.replica = place.rank
        self.settings = settings
        import_user_modules(*settings.external_lib)

    @verb(Dispatch.ALL)
    def host_rendezvous(self, hosts: Mapping[int, str]) -> int:
        """Host the store at which the ranks of a replica on several nodes meet; return its port."""
        from megarl.base.rendezvous import host_store

        host = hosts[self.replica]
        with held_port(host) as port:
            self._store = host_store(host, port)
        return int(self._store.port)

    @verb(Dispatch.ALL)
    def init_model(self, pending_bytes: int | None = None, nodes: Mapping[int, EngineNodes] | None = None) -> None:
        """Build the engine, stale until the first weight sync.

        Args:
            pending_bytes: see :func:`megarl.rollout.settings.engine_options`.
            nodes: nodes of each replica that spans several.
        """
        settings: RolloutSettings = self.settings
        rollout: RolloutConfig = settings.config
        if settings.first_hybrid is not None and self.replica >= settings.first_hybrid:
            assert isinstance(rollout, TrainingRolloutConfig)
            rollout = replace(rollout, free_cache_engine=True)
        model = read_model_config(settings.model_path).with_trained_tower(settings.trained_tower)
        weights, tp = WeightMap(model), rollout.tensor_model_parallel_size
        multiple = engine_vocab_multiple(rollout.name)
        self._params = [weights.rollout_params(tp, rank, vocab_multiple=multiple) for rank in range(tp)]
        self._options = options = engine_options(
            rollout,
            settings.device,
            self.replica,
            pending_bytes,
            return_routes=settings.return_routes,
            eos_token_ids=settings.eos_token_ids,
            nodes=nodes[self.replica] if nodes else None,
            image_options=settings.image_options,
            trained_tower=settings.trained_tower,
        )
        self.engine = create_engine(rollout.name, settings.model_path, options)
        self._fingerprint = WeightFingerprint(self.engine)
        self._server = EngineServer(self.engine)

    @verb(Dispatch.ONE)
    def describe(self) -> str:
        """Describe engine, devices, number format and SGLang's memory share in one line."""
        rollout, options = self.settings.config, self._options
        text = f"{rollout.name}, TP{rollout.tensor_model_parallel_size}, {rollout.dtype}"
        if options.quantization is not None:
            text += f" with linear layers in {options.quantization}"
        share = options.server_args.get(FRACTION) if isinstance(options, SGLangOptions) else None
        return text if share is None else f"{text}, {FRACTION}={share:g} of the memory that was free at its start"

    @verb(Dispatch.ALL)
    def load_hf(self) -> None:
        """Load the weights of the model folder, for jobs without an actor."""
        self.engine.load_hf(self.settings.model_path)

    @verb(Dispatch.RANK, phase="gen")
    def accept(self, client: str, requests: Sequence[Request], aborted: Sequence[str]) -> None:
        """Take new requests and abort others; see :meth:`megarl.rollout.serving.EngineServer.accept`."""
        self._server.accept(client, requests, aborted)

    @verb(Dispatch.RANK, phase="gen")
    def completions(self, client: str, wait_s: float) -> list[Completion]:
        """Wait for completions; see :meth:`megarl.rollout.serving.EngineServer.completions`."""
        return self._server.completions(client, wait_s)

    @verb(Dispatch.RANK, phase="gen")
    def forget(self, client: str) -> None:
        """Abort all requests of a client that is gone; see :meth:`megarl.rollout.serving.EngineServer.forget`."""
        self._server.forget(client)

    @verb(Dispatch.ALL, phase="update_weights")
    def pause(self) -> HeldRequests:
        """Hold all requests for a weight sync; see :meth:`megarl.rollout.serving.EngineServer.pause`."""
        return self._server.pause()

    @verb(Dispatch.ALL, phase="update_weights")
    def resume(self) -> None:
        """Continue the held requests with the new weights."""
        self._server.resume()

    @verb(Dispatch.ALL)
    def sync_places(self) -> list[ProcessLocation]:
        """Return the locations of the replica's ranks, from which the transports are chosen."""
        return list(self.engine.receiver.locations)

    @verb(Dispatch.ALL)
    def connect_sync(self, parts: Sequence[RankPlan], routes: Routes, address: StoreAddress | None, dtype: str) -> None:
        """Prepare to receive weights; each of the replica's ranks has one part of the plan."""
        self.engine.receiver.connect([ReceiverSpec(part, routes, address, dtype) for part in parts])
        self._sent_as = dtype, parts[0].float32_params

    @verb(Dispatch.ALL)
    def sleep(self, tags: Sequence[Tag]) -> None:
        """Release the memory that the tags name; the engine serves no requests."""
        if "weights" in tags:
            self._fingerprint.verify_and_clear(SERVING)
        self.engine.sleep(tags)

    @verb(Dispatch.ALL)
    def wake(self, tags: Sequence[Tag]) -> None:
        """Take back the memory that :meth:`sleep` released; the next sync brings the weights."""
        self.engine.wake(tags)

    @verb(Dispatch.ALL, phase="update_weights")
    def begin_update(self, version: int) -> None:
        """Mark the engine's weights as stale."""
        self._fingerprint.verify_and_clear(SERVING)
        self.engine.receiver.begin(version)

    @verb(Dispatch.ALL, phase="update_weights")
    def open_transfer(self, session: int) -> None:
        """Prepare to receive; a new session starts with a rendezvous with the actor's ranks."""
        self.engine.receiver.open(session)

    @verb(Dispatch.ALL, phase="update_weights")
    def import_bucket(self, index: int, messages: Sequence[Message]) -> None:
        """Let this replica's ranks write their messages of a bucket."""
        self.engine.receiver.import_bucket(index, messages)

    @verb(Dispatch.ALL, phase="update_weights")
    def weight_shares(self) -> list[dict[str, PartialChecksum]]:
        """Compute partial checksums of every Hugging Face tensor per rank; records the weights' fingerprint."""
        rectangles = [weight_rectangles(params, *self._sent_as) for params in self._params]
        shares = list(map(checksums_by_name, self._params, self.engine.rectangle_checksums(rectangles)))
        self._fingerprint.record()
        return shares

    @verb(Dispatch.ALL, phase="update_weights")
    def close_transfer(self, completed: bool) -> list[TransferUsage]:
        """End the transfer; returns the resources of each receiving process."""
        return self.engine.receiver.close(completed)

    @verb(Dispatch.ALL, phase="update_weights")
    def end_update(self, version: int) -> None:
        """Serve the new weights if they are complete."""
        self.engine.receiver.end(version)
        self._fingerprint.verify("as the update ended")

    @verb(Dispatch.ALL)
    def weight_version(self) -> int:
        """Return the version of the weights that the engine serves."""
        return self.engine.weight_version

    @verb(Dispatch.ALL)
    def checksums(self) -> list[dict[str, str]]:
        """Digest of every parameter, by rank of the replica."""
        return [self.engine.checksum(rank) for rank in range(len(self._params))]


class RolloutNodeWorker:
    """Runs a replica's ranks on one of its further nodes; the replica's own process leads them.

    Args:
        place: its rank counts the further nodes of all replicas, replica by replica.
    """

    def __init__(self, place: WorkerPlace, *, settings: RolloutSettings) -> None:
        self.rank, self.settings = place.rank, settings
        import_user_modules(*settings.external_lib)

    @verb(Dispatch.ALL)
    def init_model(self, nodes: Mapping[int, EngineNodes], pending_bytes: int | None = None) -> None:
        """Start the ranks of this node, and wait until the replica is built.

        Args:
            nodes: nodes of the replica of each process, with the number of its own.
            pending_bytes: see :func:`megarl.rollout.settings.engine_options`.
        """
        from megarl.rollout.sglang.in_process import FollowerNode

        settings = self.settings
        options = engine_options(
            settings.config,
            settings.device,
            pending_bytes=pending_bytes,
            return_routes=settings.return_routes,
            eos_token_ids=settings.eos_token_ids,
            nodes=nodes[self.rank],
            image_options=settings.image_options,
            trained_tower=settings.trained_tower,
        )
        assert isinstance(options, SGLangOptions)
        length = options.max_model_len or read_model_config(settings.model_path).max_position_embeddings
        self._node = FollowerNode(settings.model_path, length, options)
