"""Typed worker groups, one per role: the verbs of each role as the driver calls them.

A misspelt verb or a wrong argument is a type error. At run time every verb goes through
:meth:`megarl.cluster.worker_group.WorkerGroup.__getattr__`; the declarations exist for type checkers only, and a test
compares them with the marked methods of the workers.

The return type follows the dispatch of the verb. ``SPLIT`` joins the rows of all data-parallel ranks, ``ALL`` returns
a list with one entry per rank, and ``ONE`` returns the result of one rank.
"""

# ruff: noqa: D102  (the verbs are documented in the workers)

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.cluster.worker_group import WorkerGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megarl.data import DataProto
    from megarl.rollout.interface import Tag
    from megarl.rollout.serving import HeldRequests
    from megarl.rollout.sglang.options import EngineNodes
    from megarl.sharding.placement import ProcessLocation, Routes
    from megarl.sharding.plan import RankPlan, TransferUsage
    from megarl.sharding.sender import Message
    from megarl.sharding.transports.interface import StoreAddress
    from megarl.sharding.verification import PartialChecksum
    from megarl.workers.dispatch import SavedPart


class MegatronGroup(WorkerGroup):
    """Workers with a Megatron model: :class:`megarl.workers.base.MegatronWorker`."""

    if TYPE_CHECKING:

        def init_model(self) -> list[None]: ...

        def pending_device_bytes(self) -> list[int]: ...

        def pass_metrics(self) -> dict[str, float]: ...

        def describe(self) -> str: ...

        def export_hf(self, path: str, files: Mapping[str, str] = ...) -> list[None]: ...

        def save_checkpoint(
            self, path: str, contents: Sequence[str] = ..., in_background: bool = False
        ) -> list[None]: ...

        def checkpoint_written(self) -> list[bool]: ...

        def finish_checkpoint(self) -> list[SavedPart]: ...

        def load_checkpoint(self, path: str, contents: Sequence[str] = ...) -> list[None]: ...


class ReferenceGroup(MegatronGroup):
    """Workers of the reference policy: :class:`megarl.workers.frozen.ReferenceWorker`."""

    if TYPE_CHECKING:

        def compute_ref_log_prob(self, batch: DataProto) -> DataProto: ...

        def compute_ref_representations(self, batch: DataProto) -> DataProto: ...


class ActorGroup(ReferenceGroup):
    """Workers of the actor, which may hold the reference's weights too: :class:`megarl.workers.actor.ActorWorker`."""

    if TYPE_CHECKING:

        def compute_log_prob(self, batch: DataProto) -> DataProto: ...

        def hold_weights(self) -> list[None]: ...

        def release_weights(self) -> list[None]: ...

        def update_actor(self, batch: DataProto) -> dict[str, float]: ...

        def sync_place(self) -> list[ProcessLocation]: ...

        def host_sync(self) -> list[StoreAddress | None]: ...

        def connect_sync(
            self, plan: RankPlan, routes: Routes, address: StoreAddress | None, dtype: str
        ) -> list[None]: ...

        def make_room(self) -> list[None]: ...

        def open_transfer(self, session: int) -> list[None]: ...

        def export_bucket(self, index: int) -> list[dict[int, Message]]: ...

        def weight_shares(self) -> list[dict[str, PartialChecksum]]: ...

        def close_transfer(self, completed: bool) -> list[TransferUsage]: ...


class TeacherGroup(MegatronGroup):
    """Workers of a teacher in distillation: :class:`megarl.workers.frozen.TeacherWorker`."""

    if TYPE_CHECKING:

        def compute_teacher_log_prob(self, batch: DataProto) -> DataProto: ...


class CriticGroup(MegatronGroup):
    """Workers of the critic: :class:`megarl.workers.critic.CriticWorker`."""

    if TYPE_CHECKING:

        def compute_values(self, batch: DataProto) -> DataProto: ...

        def update_critic(self, batch: DataProto) -> dict[str, float]: ...


class RewardModelGroup(MegatronGroup):
    """Workers of a scoring reward model: :class:`megarl.workers.reward_model.RewardModelWorker`."""

    if TYPE_CHECKING:

        def compute_rm_score(self, batch: DataProto) -> DataProto: ...


class RewardTrainingGroup(MegatronGroup):
    """Workers of a reward model in training: :class:`megarl.workers.reward_model.RewardTrainingWorker`."""

    if TYPE_CHECKING:

        def update_reward_model(self, batch: DataProto) -> dict[str, float]: ...

        def score_pairs(self, batch: DataProto) -> DataProto: ...


class PreferenceGroup(MegatronGroup):
    """Workers of preference optimization: :class:`megarl.workers.preference.PreferenceWorker`."""

    if TYPE_CHECKING:

        def update_preference(self, batch: DataProto) -> dict[str, float]: ...

        def compute_pair_log_probs(self, batch: DataProto) -> DataProto: ...


class KTOGroup(MegatronGroup):
    """Workers of preference optimization on single responses: :class:`megarl.workers.kto.KTOWorker`."""

    if TYPE_CHECKING:

        def update_preference(self, batch: DataProto) -> dict[str, float]: ...

        def compute_response_log_probs(self, batch: DataProto) -> DataProto: ...


class SFTGroup(MegatronGroup):
    """Workers of supervised fine-tuning: :class:`megarl.workers.supervised.SFTWorker`."""

    if TYPE_CHECKING:

        def update_sft(self, batch: DataProto) -> dict[str, float]: ...


class RolloutNodeGroup(WorkerGroup):
    """The further nodes of replicas that span nodes: :class:`megarl.workers.rollout.RolloutNodeWorker`."""

    if TYPE_CHECKING:

        def init_model(self, nodes: Mapping[int, EngineNodes], pending_bytes: int | None = None) -> list[None]: ...


class RolloutGroup(WorkerGroup):
    """Rollout replicas, one worker each: :class:`megarl.workers.rollout.RolloutWorker`.

    Attributes:
        nodes: the further nodes of the replicas, replica by replica; None = each replica is on one node.
    """

    nodes: RolloutNodeGroup | None = None

    if TYPE_CHECKING:

        def host_rendezvous(self, hosts: Mapping[int, str]) -> list[int]: ...

        def init_model(
            self, pending_bytes: int | None = None, nodes: Mapping[int, EngineNodes] | None = None
        ) -> list[None]: ...

        def describe(self) -> str: ...

        def load_hf(self) -> list[None]: ...

        def pause(self) -> list[HeldRequests]: ...

        def resume(self) -> list[None]: ...

        def sync_places(self) -> list[list[ProcessLocation]]: ...

        def connect_sync(
            self, parts: Sequence[RankPlan], routes: Routes, address: StoreAddress | None, dtype: str
        ) -> list[None]: ...

        def sleep(self, tags: Sequence[Tag]) -> list[None]: ...

        def wake(self, tags: Sequence[Tag]) -> list[None]: ...

        def begin_update(self, version: int) -> list[None]: ...

        def open_transfer(self, session: int) -> list[None]: ...

        def import_bucket(self, index: int, messages: Sequence[Message]) -> list[None]: ...

        def weight_shares(self) -> list[list[dict[str, PartialChecksum]]]: ...

        def close_transfer(self, completed: bool) -> list[list[TransferUsage]]: ...

        def end_update(self, version: int) -> list[None]: ...

        def weight_version(self) -> list[int]: ...

        def checksums(self) -> list[list[dict[str, str]]]: ...
