"""The actor: the policy in training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import (
    POLICY_LOSSES,
    ChoiceFunction,
    PolicyLoss,
    PolicyLossInputs,
    PolicyLossOptions,
    Truncation,
    WholeMiniBatch,
    kl_penalty,
    loglinear_log_probs,
    proximal_weights,
    token_keys,
)
from megarl.base.algorithm_names import FULL_KL
from megarl.base.errors import DataError
from megarl.base.rendezvous import host_store
from megarl.config import ActorConfig
from megarl.config.schema.distillation import DistillationLossConfig
from megarl.data import DataProto
from megarl.megatron import OutputOptions, PackedMicroBatch, PolicyOutputs
from megarl.megatron.checkpoint.role_state import RESUMABLE
from megarl.megatron.layers.logprobs import REF_HIDDEN, SUPPORT, TEACHER_HIDDEN, TEACHER_NUMBER
from megarl.megatron.layers.outputs import POOLED
from megarl.sharding.placement import ProcessLocation, Routes, current_location
from megarl.sharding.plan import RankPlan, TransferUsage
from megarl.sharding.sender import BucketSender, Message, destination_ranks
from megarl.sharding.transports.interface import PeerTransports, StoreAddress
from megarl.sharding.verification import PartialChecksum, partial_checksums
from megarl.workers.base import MegatronWorker, TokenLosses, TokenLossFunction, offload_after
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb
from megarl.workers.distillation import TEACHER_COLUMNS, distilled_loss, read_teacher_head
from megarl.workers.proximal_snapshot import ProximalSnapshot
from megarl.workers.rows import FORWARD, ROUTES, SAMPLE_IDS, SEQUENCES, PackedRows
from megarl.workers.settings import LogProbSettings, MicroBatchBudget, RoleSettings, TeacherHead, UpdatePlan

POLICY_COLUMNS = ("old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights", "proximal_fractions")
"""Token columns of the policy loss; the last three with a reference, rollout correction, a log-linear estimate."""


class PolicyWorker(MegatronWorker):
    """A role whose model is a language model: computes log-probs, and representations of responses."""

    def log_probs(
        self, batch: DataProto, settings: LogProbSettings, *, with_entropy: bool, with_routes: bool = False
    ) -> dict[str, Tensor] | None:
        """Compute log-probs and entropies of the response tokens, packed ``[n]`` each; None on non-owner ranks.

        ``settings.sum_pi_squared`` adds the sums of squared probabilities, ``[n]``. ``with_routes`` adds the experts of
        every token, ``[sum of sequence lengths, expert layers, per token]``, instead of replaying those of the batch.
        """
        rows = self.packed_rows(batch, settings.budget)
        options = OutputOptions(
            settings.temperature,
            with_entropy,
            record_routes=with_routes,
            vocab_size=settings.vocab_size,
            with_sum_pi_squared=settings.sum_pi_squared,
        )

        def read(groups: Sequence[Sequence[int]], outputs: Sequence[Any]) -> dict[str, Tensor]:
            columns = {"log_probs": [output.log_probs for output in outputs]}
            if with_entropy:
                columns["entropy"] = [output.entropy for output in outputs]
            if settings.sum_pi_squared:
                columns["sum_pi_squared"] = [output.sum_pi_squared for output in outputs]
            results = {name: rows.unpack(groups, packed) for name, packed in columns.items()}
            if with_routes:
                results[ROUTES] = rows.unpack_routes(groups, [output.routes for output in outputs])
            return results

        pack = partial(rows.pack, replay=not with_routes)
        return self.forward_pass(rows, settings.budget, read, pack, options)

    def representations(self, batch: DataProto, budget: MicroBatchBudget) -> DataProto | None:
        """Compute ``representations``: mean final hidden state of each row's tokens with a set ``response_mask``.

        ``[b, hidden]`` float32; zeros for a row without such tokens; None on non-owner ranks.
        """
        rows = self.packed_rows(batch, budget)

        def compute(groups: Sequence[Sequence[int]]) -> DataProto | None:
            means = self.engine.mean_hidden(
                [rows.pack(group, {POOLED: rows.column("response_mask", group)}, at_tokens=True) for group in groups]
            )
            if means is None:
                return None
            order = torch.tensor([row for group in groups for row in group]).argsort()
            return DataProto.from_dict({"representations": torch.cat(means).cpu()[order]})

        return self.memory.run_pass(FORWARD, budget, rows, compute)


class ActorWorker(PolicyWorker):
    """Trains the policy, computes log-probs, and sends its weights to the rollout engines.

    Args:
        reference: settings of the reference whose weights this worker keeps in host memory; None if the reference has
            separate workers or there is none.
        correction: bounds of the importance weights of a log-linear proximal policy, which are computed with the loss.
        distillation: the loss towards teachers; None without distillation.
        teacher_heads: output layers of the teachers, for the exact KL to them; empty without.
    """

    prefix = "actor"

    def __init__(
        self,
        place: WorkerPlace,
        *,
        settings: RoleSettings,
        config: ActorConfig,
        plan: UpdatePlan,
        log_prob: LogProbSettings,
        reference: LogProbSettings | None,
        correction: Truncation | None = None,
        distillation: DistillationLossConfig | None = None,
        teacher_heads: Sequence[TeacherHead] = (),
    ) -> None:
        super().__init__(place, settings=settings)
        self.correction = correction
        self.rank, self.host = place.rank, place.master_addr
        self.config = config
        self.plan = plan
        self.log_prob = log_prob
        self.reference = reference
        self.distillation = distillation
        self.teacher_heads = teacher_heads
        self._sender: BucketSender

    @verb(Dispatch.ALL)
    @offload_after
    def init_model(self) -> None:
        """Build the model; keep the weights of a reference that shares it, unless they are the base of adapters."""
        super().init_model()
        self._proximal = ProximalSnapshot(self.engine)
        self._as_reference = self.reference_scope() if self.reference else None
        self._reference_head = None
        if self.reference and (self._learns_full_kl or self.reference.full_kl):
            with self._reference_model():
                self._reference_head = self.engine.output_weight()
        heads = self.teacher_heads if self.runtime.is_last_stage else ()
        layers = [read_teacher_head(head, self.engine.weight_map, self.runtime) for head in heads]
        offloads = self.settings.megatron.param_offload
        self._teacher_heads = layers if offloads else [layer.to(self.runtime.device) for layer in layers]

    def _reference_model(self) -> AbstractContextManager[None]:
        assert self._as_reference is not None, "checked in the configuration: the reference lives in the actor"
        return self._as_reference()

    @property
    def _learns_full_kl(self) -> bool:
        return self.config.use_kl_loss and self.config.kl_loss_type == FULL_KL

    @verb(Dispatch.SPLIT, phase="old_log_prob", columns=(*SEQUENCES, SUPPORT, ROUTES))
    @offload_after
    def compute_log_prob(self, batch: DataProto) -> DataProto | None:
        """Compute ``old_log_probs`` of the response tokens and their ``entropys``, ``[b, R]``, before the updates.

        The weights are the current ones, unless :meth:`hold_weights` keeps others (the proximal policy). Routing replay
        R2 adds ``routed_experts``, the experts of every token, for the update; R3 uses those of the rollout engine. An
        estimator with an optimal token baseline reads ``sum_pi_squared``, the sum of the squared probabilities of each
        token's distribution.

        Raises:
            DataError: routing replay R3 is on, and the batch has no routes.
        """
        replay = self.config.router_replay.mode == "R2"
        if self.config.router_replay.from_engine:
            self._require_routes(batch)
        with self._proximal.in_model():
            result = self.log_probs(batch, self.log_prob, with_entropy=True, with_routes=replay)
        if result is None:
            return None
        optional = {name: result[name] for name in ("sum_pi_squared", ROUTES) if name in result}
        columns = {"old_log_probs": result["log_probs"], "entropys": result["entropy"], **optional}
        return batch.token_columns(columns)

    @verb(Dispatch.ALL, phase="old_log_prob")
    @offload_after
    def hold_weights(self) -> None:
        """Keep the current weights for :meth:`compute_log_prob`, through all updates of a sync interval.

        They stay in host memory until the next call replaces them, or until they are released.
        """
        self._proximal.take()

    @verb(Dispatch.ALL, phase="old_log_prob")
    def release_weights(self) -> None:
        """Free the proximal snapshot; log-probs are those of the current weights again."""
        self._proximal.free()

    def load_checkpoint(self, path: str, contents: Sequence[str] = RESUMABLE) -> None:
        """Restore a saved state, and free the proximal snapshot; see :meth:`SavingWorker.load_checkpoint`."""
        super().load_checkpoint(path, contents)
        self._proximal.free()

    @verb(Dispatch.SPLIT, phase="ref", columns=(*SEQUENCES, SUPPORT))
    @offload_after
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto | None:
        """Compute ``ref_log_prob`` of the response tokens, ``[b, R]``, under the reference policy.

        If configured also ``ref_kl``, the exact KL of the current policy to the reference.
        """
        assert self.reference is not None, "no reference lives in the actor"
        with self._reference_model():
            result = self.log_probs(batch, self.reference, with_entropy=False)
        columns = {} if result is None else {"ref_log_prob": result["log_probs"]}
        if self.reference.full_kl:
            columns |= self._full_kl(batch, self.reference)
        return batch.token_columns(columns) if columns else None

    def _full_kl(self, batch: DataProto, settings: LogProbSettings) -> dict[str, Tensor]:
        """``ref_kl``, packed ``[n]``; empty on non-owner ranks."""
        rows = self.packed_rows(batch, settings.budget)

        def compute(groups: Sequence[Sequence[int]]) -> dict[str, Tensor]:
            states = self._reference_states(rows, groups)
            outputs = self.engine.forward(
                [rows.pack(group, {REF_HIDDEN: part}) for group, part in zip(groups, states, strict=True)],
                OutputOptions(settings.temperature, ref_head=self._reference_head),
            )
            return {} if outputs is None else {"ref_kl": rows.unpack(groups, [output.ref_kl for output in outputs])}

        return self.memory.run_pass(FORWARD, settings.budget, rows, compute)

    def _reference_states(self, rows: PackedRows, groups: Sequence[Sequence[int]]) -> list[Tensor]:
        """Final hidden states per micro-batch, ``[response tokens, hidden]``; empty before the last stage."""
        micro_batches = [rows.pack(group, replay=False) for group in groups]
        with self._reference_model():
            states = self.engine.hidden(micro_batches)
        return states or [torch.zeros(len(micro_batch.targets), 0) for micro_batch in micro_batches]

    @verb(Dispatch.SPLIT, phase="repr_align", columns=(*SEQUENCES, "response_mask"))
    @offload_after
    def compute_ref_representations(self, batch: DataProto) -> DataProto | None:
        """Compute ``representations [b, hidden]`` of the responses under the reference policy."""
        assert self.reference is not None, "no reference lives in the actor"
        with self._reference_model():
            return self.representations(batch, self.reference.budget)

    @verb(
        Dispatch.SPLIT,
        mini_batches="actor_mini_batch_rows",
        phase="update_actor",
        columns=(*SEQUENCES, SUPPORT, ROUTES, "response_mask", *POLICY_COLUMNS, *TEACHER_COLUMNS, *SAMPLE_IDS),
    )
    def update_actor(self, batch: DataProto) -> dict[str, float]:
        """Update the policy (PPO): ``ppo_epochs`` passes over the mini-batches.

        Raises:
            DataError: routing replay is on, and the batch has no routes.
        """
        if self.config.router_replay.enable:
            self._require_routes(batch)
        self._proximal.mark_changed()
        unread = set() if self.config.use_kl_loss and not self._learns_full_kl else {"ref_log_prob"}
        if not self.runtime.is_last_stage:
            unread |= {TEACHER_HIDDEN, TEACHER_NUMBER}
        columns = [name for name in (*POLICY_COLUMNS, *TEACHER_COLUMNS) if name in batch.tensors and name not in unread]
        outputs = OutputOptions(self.log_prob.temperature, with_entropy=self.config.entropy_coeff != 0)
        loss = POLICY_LOSSES.find(self.config.policy_loss.loss_mode)
        if self._learns_full_kl:
            outputs = outputs._replace(ref_head=self._reference_head)
        token_loss: TokenLossFunction = partial(policy_loss, self.config, loss, correction=self.correction)
        if self.distillation is not None:
            token_loss = partial(distilled_loss, self.distillation, loss_options(self.config), token_loss)
            outputs = outputs._replace(at_teacher_ids=self.distillation.teacher_topk > 0)
            outputs = outputs._replace(teacher_heads=[head.to(self.runtime.device) for head in self._teacher_heads])

        def extra_columns(rows: PackedRows, mini_batch: range, groups: Sequence[Sequence[int]]) -> dict[str, Tensor]:
            extra = self._chosen_tokens(loss.choose, rows, mini_batch, groups) if loss.choose else {}
            if self._learns_full_kl:
                extra[REF_HIDDEN] = rows.repack(groups, self._reference_states(rows, groups), mini_batch)
            return extra

        metrics = self.update(batch, self.plan, columns, token_loss, outputs, extra_columns)
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = self.config.kl_loss_coef
        return metrics

    def _require_routes(self, batch: DataProto) -> None:
        if ROUTES not in batch.tensors:
            replay = self.config.router_replay
            origin = "which the rollout engine returns" if replay.from_engine else "which compute_log_prob records"
            raise DataError(
                f"actor_rollout_ref.actor.router_replay.mode={replay.mode}: the batch has no {ROUTES}, {origin}; the "
                "routers would select other experts",
                code="rollout.no-routes",
            )

    def _chosen_tokens(
        self, choose: ChoiceFunction, rows: PackedRows, mini_batch: range, groups: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """``chosen``: tokens that the loss selects from the mini-batch of all data-parallel ranks; communicates."""
        assert self.engine.optimizer is not None
        micro_batches = [rows.pack(group) for group in groups]
        outputs = self.engine.forward(micro_batches, OutputOptions(self.log_prob.temperature))
        mask = rows.column("response_mask", mini_batch)
        if outputs is None:
            return {"chosen": torch.zeros_like(mask)}  # the loss is computed on the last stage
        log_prob = rows.repack(groups, [output.log_probs.float().cpu() for output in outputs], mini_batch)
        old = rows.column("old_log_probs", mini_batch)
        if "proximal_fractions" in rows.batch.tensors:
            old = loglinear_log_probs(log_prob, old, rows.column("proximal_fractions", mini_batch))
        packed_columns = [log_prob, old, rows.column("advantages", mini_batch)]
        keys = token_keys(rows.samples(mini_batch), self.settings.seed, self.engine.optimizer.steps)
        local = [column.where(mask.bool(), 0) for column in packed_columns]
        gathered, local_slice = self.gather_over_dp([*local, mask, keys])
        chosen = choose(WholeMiniBatch(*gathered), loss_options(self.config))
        return {"chosen": chosen[local_slice].to(mask.dtype)}

    @verb(Dispatch.ALL)
    def sync_place(self) -> ProcessLocation:
        """Return this process's location, from which the transports to the rollout engines are chosen."""
        return current_location(str(self.runtime.device))

    @verb(Dispatch.ALL)
    def host_sync(self) -> StoreAddress | None:
        """Start the rendezvous store of the weight sync; returns its address on rank 0, None on other ranks."""
        if self.rank != 0:
            return None
        self._store = host_store(self.host)
        return StoreAddress(self.host, self._store.port)

    @verb(Dispatch.ALL)
    def connect_sync(self, plan: RankPlan, routes: Routes, address: StoreAddress | None, dtype: str) -> None:
        """Prepare to send weights by a plan, in the engines' number format."""
        device, sent = self.runtime.device, getattr(torch, dtype)
        peers = PeerTransports.for_sender(
            routes, self.rank, destination_ranks(plan.sent_by(self.rank)), device, address
        )
        self._sender = BucketSender(plan, self.rank, self.engine.weights.named, peers, sent, device)
        self._sent_as = sent, plan.float32_params

    @verb(Dispatch.ALL, phase="update_weights")
    def make_room(self) -> None:
        """Offload the configured parts before the engines wake."""
        self.free_device()

    @verb(Dispatch.ALL, phase="update_weights")
    def open_transfer(self, session: int) -> None:
        """Prepare to send; a new session starts with a rendezvous with the rollout ranks."""
        self._sender.peers.open(session)

    @verb(Dispatch.ALL, phase="update_weights")
    def export_bucket(self, index: int) -> dict[int, Message]:
        """Pack this rank's part of a bucket, by rollout rank."""
        return self._sender.export_bucket(index)

    @verb(Dispatch.ALL, phase="update_weights")
    def weight_shares(self) -> dict[str, PartialChecksum]:
        """Compute checksums of this rank's part of every Hugging Face tensor; each element counts once."""
        params = self.engine.weight_map.export_params(self.settings.layout, self.rank)
        return partial_checksums(params, self.engine.weights.named(), *self._sent_as, convert=True)

    @verb(Dispatch.ALL, phase="update_weights")
    def close_transfer(self, completed: bool) -> TransferUsage:
        """End the transfer; returns the resources of sending on this rank."""
        usage = self._sender.close(completed)
        self.free_device()
        return usage


def loss_options(config: ActorConfig) -> PolicyLossOptions:
    """Build the options of the policy loss."""
    loss = config.policy_loss
    return PolicyLossOptions(
        clip_ratio_low=config.clip_ratio_low or config.clip_ratio,
        clip_ratio_high=config.clip_ratio_high or config.clip_ratio,
        clip_ratio_c=config.clip_ratio_c,
        tau_pos=config.tau_pos,
        tau_neg=config.tau_neg,
        clip_cov_ratio=loss.clip_cov_ratio,
        clip_cov_lb=loss.clip_cov_lb,
        clip_cov_ub=loss.clip_cov_ub,
        kl_cov_ratio=loss.kl_cov_ratio,
        ppo_kl_coef=loss.ppo_kl_coef,
        m2_threshold=loss.m2_threshold,
    )


def policy_loss(
    config: ActorConfig,
    loss_of: PolicyLoss,
    outputs: PolicyOutputs,
    micro_batch: PackedMicroBatch,
    correction: Truncation | None = None,
) -> TokenLosses:
    """Compute the policy's per-token loss with entropy bonus and KL to the reference, and its metrics.

    ``loss = pg_loss - entropy_coeff * entropy + kl_loss_coef * kl``; all tensors are packed ``[n]``. With rollout
    correction, ``pg_loss`` is the policy loss times the token's importance weight.

    With ``proximal_fractions`` the old log-probs are the behaviour policy's. The ratio is then about a log-linear
    estimate of the proximal policy, and the weight is that of the estimate, within the bounds of ``correction``.
    """
    columns, estimate = micro_batch.columns, {}
    old, weights = columns["old_log_probs"], columns.get("rollout_is_weights")
    if "proximal_fractions" in columns:
        assert correction is not None and weights is None, "checked in the configuration"
        behaviour, old = old, loglinear_log_probs(outputs.log_probs, old, columns["proximal_fractions"])
        weights = proximal_weights(old, behaviour, correction)
        estimate = {"rollout_is_mean": weights}
    policy = loss_of(
        PolicyLossInputs(
            log_prob=outputs.log_probs,
            old_log_prob=old,
            advantages=columns["advantages"],
            response_mask=columns["response_mask"],
            lengths=micro_batch.row_lengths,
            chosen=columns.get("chosen"),
            options=loss_options(config),
        )
    )
    loss = policy.loss
    if weights is not None:
        loss = loss * weights
    loss_metrics = {"pg_loss": loss}
    if outputs.entropy is not None:
        loss = loss - config.entropy_coeff * outputs.entropy  # the entropy bonus (Schulman et al. 2017, eq. 9)
    if config.use_kl_loss:
        kl = outputs.ref_kl
        if kl is None:
            kl = kl_penalty(outputs.log_probs, columns["ref_log_prob"], config.kl_loss_type)
        loss, loss_metrics["kl_loss"] = loss + config.kl_loss_coef * kl, kl
    return TokenLosses(loss, loss_metrics, {**policy.diagnostics, **estimate})
