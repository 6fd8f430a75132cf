"""The dry run of a reinforcement-learning job."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megarl.amounts import gib, some
from megarl.config import TrainConfig
from megarl.data import DataProto, StatefulLoader
from megarl.models import WeightMap, read_model_config
from megarl.rollout.agents import check_agent_loops
from megarl.rollout.agents.build import default_agent_loop
from megarl.rollout.endpoint import build_endpoint
from megarl.sharding.coverage import check_coverage
from megarl.sharding.placement import Placement, RolloutLayout
from megarl.sharding.plan import build_plan
from megarl.trainer.dry_run.rehearsal import Rehearsal
from megarl.trainer.preflight import check_algorithm, check_data, check_engine, check_learners, check_reward_model
from megarl.trainer.prompts import prompt_loader, validation_loader
from megarl.trainer.reward_functions import check_rewards, reward_plan
from megarl.trainer.reward_phase import reward_manager
from megarl.trainer.roles import ELEMENT_BYTES
from megarl.trainer.session import load_tokenizer
from megarl.workers.layouts import layout_of

PROVED_RANKS = 8


class TrainRehearsal(Rehearsal):
    """PPO and its critic-free relatives.

    Args:
        config: complete.
    """

    model_key = "actor_rollout_ref.model"
    rows = "prompts"
    config: TrainConfig

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)

    def roles(self) -> dict[str, tuple[str, str]]:
        """Models that learn, the reference and the reward model; their weights need not be there."""
        config, policy = self.config, self.config.actor_rollout_ref
        check_learners(config, weights=False)
        roles = {"actor": (policy.model.path, layout_of(policy.actor.megatron).describe())}
        if config.uses_reference:
            own = policy.ref.megatron
            placed = layout_of(own).describe() if own else "its weights in host memory, swapped into the actor's model"
            roles["reference"] = (policy.model.path, placed)
        if config.uses_critic:
            roles["critic"] = (str(config.critic.model.path), layout_of(config.critic.megatron).describe())
        if config.reward_model.enable:
            check_reward_model(config, weights=False)
            model = str(config.reward_model.model.path)
            roles["reward model"] = (model, layout_of(config.reward_model.megatron).describe())
        return roles

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's."""
        return load_tokenizer(str(self.config.actor_rollout_ref.model.tokenizer_path))

    def training_rows(self) -> StatefulLoader:
        """Prompts."""
        check_data(self.config)
        return prompt_loader(self.config, self._needed(self._tokenizer, "tokenizer"))

    def held_out_rows(self) -> StatefulLoader | None:
        """Prompts, where there are files of such."""
        if not self.config.data.val_files:
            return None
        return validation_loader(self.config, self._needed(self._tokenizer, "tokenizer"))

    def engine(self) -> Iterator[str]:
        """Whether the engine runs the model, and takes its weights."""
        policy = self.config.actor_rollout_ref
        check_engine(self.config, read_model_config(policy.model.path))
        yield f"{policy.rollout.name}: {self._rollout().describe()}"

    def algorithm(self) -> Iterator[str]:
        """Estimator, loss and schedules, for the length of the run."""
        config = self.config
        check_algorithm(config)
        loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
        yield f"advantages by {config.algorithm.adv_estimator}, policy loss {loss}"
        yield from super().algorithm()

    def rewards(self) -> Iterator[str]:
        """Calls the functions on one row, whose answer is the ground truth; not those that ask a service."""
        config = self.config
        check_rewards(config)
        if config.reward_model.enable:
            yield "the reward model scores; it is not run here"
        if config.reward_model.function_weight == 0:
            return
        names = [function.spec for function in reward_plan(config).functions]
        if services := _services(config, names):
            yield f"would call {', '.join(names)}, which asks {services}: not called here"
            return
        row, answer = self._answered_row()
        assert self._tokenizer is not None  # or there is no row
        workers = config.reward_model.num_workers
        few = dataclasses.replace(config.reward_model, num_workers=1 if workers is None else min(workers, 1))
        with reward_manager(dataclasses.replace(config, reward_model=few), self._tokenizer) as manager:
            scored = manager.score(row).batch.batch
        assert scored is not None
        score = float(scored["token_level_scores"].sum())
        source = row.non_tensor_batch["data_source"][0]
        yield f"{', '.join(names)} called on a row of {source!r} answered by {answer[:60]!r}: {score:g}"

    def conversations(self) -> Iterator[str]:
        """Agent loops, tools, and the endpoint for programs of other people, which is not opened."""
        check_agent_loops(self.config)
        endpoint = build_endpoint(self.config, self._needed(self._tokenizer, "tokenizer"))
        yield f"led by {default_agent_loop(self.config)}"
        if endpoint is not None:
            yield "an endpoint would be opened for programs that lead conversations"

    def resharding(self) -> Iterator[str]:
        """The plan by which the actor's weights reach every replica; proved whole for all ranks of one replica."""
        self._needed(self._layouts_fit, "models and layouts")
        config, policy, rollout = self.config, self.config.actor_rollout_ref, self._rollout()
        train, devices = layout_of(policy.actor.megatron), self.config.trainer.num_devices
        weight_map = WeightMap(read_model_config(policy.model.path))
        placement = Placement.of_devices(
            [rank % devices for rank in range(train.world_size)],
            [rank % devices for rank in range(rollout.world_size)],
            config.trainer.n_gpus_per_node,
        )
        element, bucket = ELEMENT_BYTES[policy.rollout.dtype], config.sync.bucket_megabytes * 2**20
        plan = build_plan(weight_map, train, rollout, bucket, element, placement)
        # every replica receives the same parcels, so one stands for all; of a wide one eight ranks stand for the others
        proved = range(0, rollout.tp, max(rollout.tp // PROVED_RANKS, 1))
        check_coverage(plan, {rank: weight_map.rollout_params(rollout.tp, rank, rollout.ep) for rank in proved})
        sender, receiver, nbytes = plan.pair_nbytes()
        far = sum(
            int(count)
            for one, other, count in zip(sender, receiver, nbytes, strict=True)
            if placement.train[one].node != placement.rollout[other].node
        )
        shipped = f"{gib(plan.nbytes)} GiB in {some(len(plan.buckets), 'bucket')}"
        yield f"{train.describe()} to {rollout.describe()}: {shipped}"
        yield f"{gib(far)} GiB of it between nodes"
        yield f"each element arrives exactly once (looked at: {len(proved)} of a replica's {rollout.tp} ranks)"

    def _rollout(self) -> RolloutLayout:
        rollout = self.config.actor_rollout_ref.rollout
        return RolloutLayout(tp=rollout.tensor_model_parallel_size, replicas=rollout.replicas or 1)

    def _answered_row(self) -> tuple[DataProto, str]:
        """The first prompt with its ground truth as the answer, and that answer."""
        tokenizer, row = self._needed(self._tokenizer, "tokenizer"), self._needed(self._first_batch, "data")[:1]
        told = row.non_tensor_batch["reward_model"][0]
        answer = str(told.get("ground_truth") if hasattr(told, "get") else told)
        ids = tokenizer.encode(answer, add_special_tokens=False) or [tokenizer.eos_token_id]
        responses = torch.tensor([ids])
        mask = torch.cat([row.batch["attention_mask"], torch.ones_like(responses)], 1)
        tensors = {"prompts": row.batch["prompts"], "responses": responses, "attention_mask": mask}
        return DataProto.from_dict(tensors, {**row.non_tensor_batch, "uid": np.array(["0"], dtype=object)}), answer


def _services(config: TrainConfig, names: list[str]) -> str:
    """Services that functions ask, which may cost money or be reachable from the cluster only."""
    keys = config.reward_model
    asked = [str(keys.judge.base_url)] if "judge" in names else []
    return ", ".join(asked + ([str(keys.sandbox_fusion.url)] if "code" in names and keys.sandbox_fusion.url else []))
