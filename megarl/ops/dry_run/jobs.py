"""Dry runs of the training jobs: reinforcement learning, supervised fine-tuning and reward-model training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megarl.agents import check_agent_loops
from megarl.agents.build import default_agent_loop
from megarl.agents.endpoint import check_endpoint
from megarl.base.formatting import DTYPE_BYTES, count_noun, gib
from megarl.config import SupervisedConfig, TrainConfig
from megarl.data import DataProto, StatefulLoader
from megarl.data.tokenizers import load_tokenizer
from megarl.models import WeightMap, read_model_config
from megarl.ops.dry_run.parts import WARNING, DryRun, check_parts
from megarl.rollout.registry import engine_vocab_multiple
from megarl.samples.reward_functions import check_rewards, reward_plan
from megarl.samples.reward_phase import reward_manager
from megarl.sharding.placement import Placement, RolloutLayout
from megarl.sharding.plan import build_plan
from megarl.sharding.verification import check_coverage
from megarl.trainer.jobs.early_checks import check_learners, check_reward_model, check_rows
from megarl.trainer.jobs.preflight import check_algorithm, check_data_classes, check_engine, check_teacher_tokenizers
from megarl.trainer.jobs.supervised import SupervisedJob
from megarl.trainer.jobs.supervised_jobs import supervised_job
from megarl.trainer.phases.data_loading import prompt_loader, validation_loader
from megarl.workers.settings import layout_of

CHECKED_RANKS = 8  # ranks of a replica whose weight coverage is checked
ANSWER_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")
"""Formats of an answer that reward functions of common data sets read."""
NOTHING_SCORED = (
    f"{WARNING}the ground truth itself scores nothing, so perhaps no answer is ever rewarded; check the reward "
    "function and reward_model.ground_truth of the data, unless the function reads yet another format"
)


class TrainDryRun(DryRun):
    """Dry run of a PPO or GRPO job."""

    model_key = "actor_rollout_ref.model"
    rows = "prompts"
    config: TrainConfig

    def roles(self) -> dict[str, tuple[str, str]]:
        """Check actor, critic, reference and reward model; their weights are optional."""
        config, policy = self.config, self.config.actor_rollout_ref
        check_learners(config, weights=False)
        adapters = f", adapters of rank {policy.model.lora_rank}" if policy.model.lora_rank else ""
        roles = {"actor": (policy.model.path, f"{layout_of(policy.actor.megatron).describe()}{adapters}")}
        if config.uses_reference:
            roles["reference"] = (policy.model.path, self._reference_layout())
        if config.uses_critic:
            roles["critic"] = (str(config.critic.model.path), layout_of(config.critic.megatron).describe())
        for name, teacher in config.distillation.local_teachers.items():
            roles[f"teacher {name}"] = (str(teacher.model_path), layout_of(teacher.megatron).describe())
        if config.reward.model.enable:
            check_reward_model(config, weights=False)
            model = str(config.reward.model.path)
            roles["reward model"] = (model, layout_of(config.reward.model.megatron).describe())
        return roles

    def _reference_layout(self) -> str:
        """Describe the workers of the reference, or the form in which the actor holds it."""
        policy = self.config.actor_rollout_ref
        if policy.ref.megatron:
            return layout_of(policy.ref.megatron).describe()
        if policy.model.lora_rank:
            adapters = "off" if policy.model.lora.reference == "base" else f"of {policy.model.lora_adapter_path}"
            return f"the actor's model with adapters {adapters}"
        return "weights in host memory, swapped into the actor's model"

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the policy's tokenizer."""
        return load_tokenizer(str(self.config.actor_rollout_ref.model.tokenizer_path))

    def training_rows(self) -> StatefulLoader:
        """Return the prompt loader."""
        check_rows(self.config)
        check_data_classes(self.config)
        return prompt_loader(self.config, self._needed(self._tokenizer, "tokenizer"))

    def held_out_rows(self) -> StatefulLoader | None:
        """Return the validation loader, or None without validation files."""
        if not self.config.data.val_files:
            return None
        return validation_loader(self.config, self._needed(self._tokenizer, "tokenizer"))

    def engine(self) -> Iterator[str]:
        """Check that the engine supports the model and can load its weights."""
        policy = self.config.actor_rollout_ref
        check_engine(self.config, read_model_config(policy.model.path))
        yield f"{policy.rollout.name}: {self._rollout().describe()}"

    def algorithm(self) -> Iterator[str]:
        """Check estimator, loss and schedules."""
        config = self.config
        check_algorithm(config)
        check_teacher_tokenizers(config)
        loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
        yield f"advantage estimator {config.algorithm.adv_estimator}, policy loss {loss}"
        for name, teacher in config.distillation.teacher_models.items() if config.distillation.enabled else ():
            if teacher.server.urls:
                yield f"teacher {name}: SGLang at {', '.join(teacher.server.urls)}; not asked here"
        yield from super().algorithm()

    def rewards(self) -> Iterator[str]:
        """Call the reward functions on one row, with the ground truth as response, unless they use a service."""
        config = self.config
        check_rewards(config)
        if config.reward.model.enable:
            yield "a reward model scores; not run here"
        if config.reward.function_weight == 0:
            return
        names = [function.spec for function in reward_plan(config).functions]
        if services := _services(config, names):
            yield f"would call {', '.join(names)}, which uses {services}: not called here"
            return
        workers = config.reward.num_workers
        few = dataclasses.replace(config.reward, num_workers=1 if workers is None else min(workers, 1))
        tokenizer = self._needed(self._tokenizer, "tokenizer")
        truth = self._needed(self._first_batch, "data").non_tensor_batch["reward_model"][0]
        truth = str(truth.get("ground_truth") if hasattr(truth, "get") else truth)
        with reward_manager(dataclasses.replace(config, reward=few), tokenizer) as manager:
            for answer in (form.format(truth) for form in ANSWER_FORMS):
                row = self._answered_row(answer)
                scored = manager.score(row).batch.tensors
                assert scored is not None
                score = float(scored["token_level_scores"].sum())
                source = row.non_tensor_batch["data_source"][0]
                yield f"{', '.join(names)} called on a row of {source!r} answered by {answer[:60]!r}: {score:g}"
                if score > 0:
                    return
        yield NOTHING_SCORED

    def conversations(self) -> Iterator[str]:
        """Check agent loops, tools and the endpoint for external agents, which is not opened."""
        check_agent_loops(self.config)
        check_endpoint(self.config)
        yield f"agent loop {default_agent_loop(self.config)}"
        if self.config.actor_rollout_ref.rollout.serves_endpoint:
            yield "an endpoint would be opened for external agents"

    def resharding(self) -> Iterator[str]:
        """Build the reshard plan from the actor to every replica, and check its coverage on one replica."""
        self._needed(self._layouts_fit, "models and layouts")
        config, policy, rollout = self.config, self.config.actor_rollout_ref, self._rollout()
        train, devices = layout_of(policy.actor.megatron), self.config.trainer.num_devices
        own, hybrid = policy.rollout.own_devices, config.hybrid_replicas * policy.rollout.devices_per_replica
        engines = [(devices if own else 0) + rank % (own or devices) for rank in range(rollout.world_size - hybrid)]
        weight_map = WeightMap(read_model_config(policy.model.path).with_trained_tower(policy.trains_tower))
        placement = Placement.of_devices(
            [rank % devices for rank in range(train.world_size)],
            [*engines, *range(hybrid)],
            config.trainer.n_gpus_per_node,
        )
        element, bucket = DTYPE_BYTES[policy.rollout.dtype], config.sync.bucket_megabytes * 2**20
        wave_replicas = config.async_training.sync_wave_size
        together = policy.rollout.quantization is not None
        plan = build_plan(weight_map, train, rollout, bucket, element, placement, wave_replicas, together=together)
        # Every replica receives the same slices, so one is enough; of a large replica, eight ranks are enough.
        checked = range(0, rollout.tp, max(rollout.tp // CHECKED_RANKS, 1))
        params = {
            rank: weight_map.rollout_params(rollout.tp, rank, rollout.ep, rollout.vocab_multiple) for rank in checked
        }
        check_coverage(plan, params)
        sender, receiver, nbytes = plan.pair_nbytes()
        between_nodes = sum(
            int(count)
            for source, target, count in zip(sender, receiver, nbytes, strict=True)
            if placement.train[source].node != placement.rollout[target].node
        )
        volume = f"{gib(plan.nbytes)} GiB in {count_noun(len(plan.buckets), 'bucket')}"
        waves = f" and {len(plan.waves)} waves" if wave_replicas else ""
        yield f"{train.describe()} to {rollout.describe()}: {volume}{waves}"
        yield f"{gib(between_nodes)} GiB of it between nodes"
        if together:
            yield f"engines quantize linear layers to {policy.rollout.quantization} as they arrive"
        yield f"each element arrives exactly once (checked: {len(checked)} of a replica's {rollout.tp} ranks)"

    def _rollout(self) -> RolloutLayout:
        rollout = self.config.actor_rollout_ref.rollout
        return RolloutLayout(
            tp=rollout.tensor_model_parallel_size,
            replicas=(rollout.replicas or 1) + self.config.hybrid_replicas,
            vocab_multiple=engine_vocab_multiple(rollout.name),
        )

    def _answered_row(self, answer: str) -> DataProto:
        """Return the first prompt with an answer as the response."""
        tokenizer, row = self._needed(self._tokenizer, "tokenizer"), self._needed(self._first_batch, "data")[:1]
        ids = tokenizer.encode(answer, add_special_tokens=False) or [tokenizer.eos_token_id]
        responses = torch.tensor([ids])
        mask = torch.cat([row.padded("attention_mask"), torch.ones_like(responses)], 1)
        tensors = {"prompts": row.padded("prompts"), "responses": responses, "attention_mask": mask}
        return DataProto.from_dict(tensors, {**row.non_tensor_batch, "uid": np.array(["0"], dtype=object)})


def _services(config: TrainConfig, names: list[str]) -> str:
    """Return the services that reward functions call; they may cost money or be reachable only from the cluster."""
    keys = config.reward
    urls = [str(keys.judge.base_url)] if "judge" in names else []
    return ", ".join(urls + ([str(keys.sandbox.url)] if "code" in names and keys.sandbox.url else []))


class SupervisedDryRun(DryRun):
    """Dry run of supervised fine-tuning or reward-model training."""

    model_key = "model"

    def __init__(self, job: SupervisedJob) -> None:
        super().__init__(job.config)
        self.job = job
        self.rows = job.rows

    def roles(self) -> dict[str, tuple[str, str]]:
        """Check the model; its weights are optional."""
        config = self.job.config
        check_learners(config, weights=False)
        return {config.role: (config.model.path, layout_of(config.megatron).describe())}

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the job's tokenizer."""
        return self.job.tokenizer

    def training_rows(self) -> StatefulLoader:
        """Return the loader of the training data."""
        check_rows(self.config)
        return self.job.training_loader()

    def held_out_rows(self) -> StatefulLoader | None:
        """Return the loader of the validation data, or None."""
        return self.job.held_out


def run(config: TrainConfig | SupervisedConfig) -> None:
    """Check every part of a training job and print the result of each.

    Raises:
        ConfigError: a part failed; the message lists all failed parts.
    """
    if isinstance(config, SupervisedConfig):
        check_parts(SupervisedDryRun(supervised_job(config)))
    else:
        check_parts(TrainDryRun(config))
