"""A run without the model's mathematics: every part of it is gone through on this machine, with no device and no Ray.

Parts do not stop each other: what is wrong is told of all of them at once. Nothing is written but into the data
cache, and what the run's own checks would write.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megarl.config import TrainConfig
from megarl.config.batch import BatchPlan, plan_batches, render_plan
from megarl.data import DataProto
from megarl.data.prompt_queue import PromptQueue
from megarl.doctor.node import Status, needs_of
from megarl.doctor.node.storage import check_checkpoint_room
from megarl.errors import CheckpointError, ConfigError, MegarlError
from megarl.models import WeightMap, read_model_config
from megarl.models.hf_folder import INDEX_FILE, SINGLE_FILE, check_model_folder
from megarl.plan.report import shortfall_lines
from megarl.plan.verdict import plan_run
from megarl.rollout.agents import check_agent_loops
from megarl.rollout.agents.build import default_agent_loop
from megarl.rollout.endpoint import build_endpoint
from megarl.sharding.coverage import check_coverage
from megarl.sharding.placement import Placement, RolloutLayout
from megarl.sharding.plan import build_plan
from megarl.tracking import check_trackers
from megarl.trainer.preflight import (
    check_algorithm,
    check_data,
    check_engine,
    check_learners,
    check_reward_model,
    check_schedules,
)
from megarl.trainer.prompts import prompt_loader, validation_loader
from megarl.trainer.reward_functions import check_rewards, reward_plan
from megarl.trainer.reward_phase import reward_manager
from megarl.trainer.roles import ELEMENT_BYTES
from megarl.trainer.run_state import find_resume
from megarl.trainer.session import load_tokenizer
from megarl.workers.layouts import layout_of

GIB = 2**30
PROVED_RANKS = 8


def dry_run(config: TrainConfig, tell: Callable[[str], None] = print) -> None:
    """Goes through all parts and tells of each what the run would do.

    Args:
        config: complete.
        tell: shows the user a line.

    Raises:
        ConfigError: some part is wrong; each was told as it was found.
    """
    rehearsal, wrong = Rehearsal(config), []
    for name, part in rehearsal.parts().items():
        began = time.perf_counter()
        try:
            lines = list(part())
        except MegarlError as error:
            wrong.append(name)
            tell(f"fail  {name}: {error}")
            continue
        tell(f"ok    {name} ({time.perf_counter() - began:.1f} s)")
        for line in lines:
            tell(f"      {line}")
    if wrong:
        raise ConfigError(f"dry run: {len(wrong)} of {len(rehearsal.parts())} parts failed: {', '.join(wrong)}")
    tell("dry run: every part is fine; without trainer.dry_run the workers would be started now")


class Rehearsal:
    """The parts of a run, in its own order; a later one that needs an earlier one's result says so.

    Args:
        config: complete.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._batches: BatchPlan | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._prompts: DataProto | None = None
        self._total_steps: int | None = None
        self._layouts_fit: bool | None = None

    def parts(self) -> dict[str, Callable[[], Iterator[str]]]:
        """By name; each yields what there is to tell, or raises what is wrong."""
        return {
            "batches": self.batches,
            "models and layouts": self.models,
            "rollout engine": self.engine,
            "tokenizer": self.tokenizer,
            "data": self.data,
            "algorithm": self.algorithm,
            "rewards": self.rewards,
            "conversations": self.conversations,
            "memory": self.memory,
            "resharding": self.resharding,
            "checkpoints": self.checkpoints,
            "trackers": self.trackers,
        }

    def batches(self) -> Iterator[str]:
        """How a step's samples are divided."""
        self._batches = plan_batches(self.config)
        yield from render_plan(self._batches).splitlines()

    def models(self) -> Iterator[str]:
        """Every role's model and layout; weights where they are there."""
        config, policy = self.config, self.config.actor_rollout_ref
        check_learners(config, weights=False)
        self._layouts_fit = True
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
        yield f"{config.trainer.nnodes} nodes of {config.trainer.n_gpus_per_node} devices ({config.trainer.device})"
        for role, (path, layout) in roles.items():
            yield f"{role}: {read_model_config(path).architecture} of {path}, {layout}"
        for path in dict.fromkeys(path for path, _ in roles.values()):
            yield _weights(path)

    def engine(self) -> Iterator[str]:
        """Whether the engine runs the model, and takes its weights."""
        policy = self.config.actor_rollout_ref
        check_engine(self.config, read_model_config(policy.model.path))
        yield f"{policy.rollout.name}: {self._rollout().describe()}"

    def tokenizer(self) -> Iterator[str]:
        """Loads it."""
        path = str(self.config.actor_rollout_ref.model.tokenizer_path)
        self._tokenizer = load_tokenizer(path)
        words, rows = len(self._tokenizer), read_model_config(self.config.actor_rollout_ref.model.path).vocab_size
        if words > rows:
            raise ConfigError(
                f"actor_rollout_ref.model.tokenizer_path={path} has {words} tokens, the model's vocabulary {rows}: "
                "name the model's own tokenizer"
            )
        yield f"{words} tokens of {path}; the model has room for {rows}"

    def data(self) -> Iterator[str]:
        """Reads the files and tokenizes the first batches as the run would."""
        config, tokenizer = self.config, self._needed(self._tokenizer, "tokenizer")
        check_data(config)
        queue = PromptQueue(prompt_loader(config, tokenizer))
        trainer = config.trainer
        self._total_steps = trainer.total_training_steps or trainer.total_epochs * len(queue)
        self._prompts = queue.take(config.data.train_batch_size)
        yield f"{len(queue)} batches per epoch; the run has {self._total_steps} steps"
        yield f"first batch: {_lengths(self._prompts)}"
        if config.data.val_files:
            held_out = next(iter(validation_loader(config, tokenizer)))
            yield f"first held-out batch: {_lengths(held_out)}"
        else:
            yield "no held-out data: nothing is validated"

    def algorithm(self) -> Iterator[str]:
        """Estimator, loss and schedules, for the length of the run."""
        config = self.config
        check_algorithm(config)
        loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
        yield f"advantages by {config.algorithm.adv_estimator}, policy loss {loss}"
        batches, steps = self._needed(self._batches, "batches"), self._needed(self._total_steps, "data")
        check_schedules(config, batches, steps)
        yield f"learning rates and weights have schedules that fit {steps} steps"

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

    def memory(self) -> Iterator[str]:
        """What the fullest device and node would hold; refused where that is more than they have."""
        self._needed(self._layouts_fit, "models and layouts")
        found, remedy = plan_run(self.config)
        name, usable = found.hardware.name, found.usable_bytes
        if not found.fits:
            lines = "; ".join(shortfall_lines(found, remedy))
            raise ConfigError(f"on {name} (trainer.hardware) it does not fit: {lines}. `megarl plan` tells more")
        for phase in found.memory.phases:
            parts = ", ".join(f"{part.owner} {part.name} {part.nbytes / GIB:.2f}" for part in phase.components[:4])
            yield f"{phase.phase}: {phase.nbytes / GIB:.2f} GiB on device {phase.device} ({parts})"
        yield f"fits {name}, of whose devices' memory {usable / GIB:.1f} GiB are usable"
        yield f"host memory of the fullest node: {found.memory.host_bytes / GIB:.2f} GiB"

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
        yield f"{train.describe()} to {rollout.describe()}: {plan.nbytes / GIB:.2f} GiB in {len(plan.buckets)} buckets"
        yield f"{far / GIB:.2f} GiB of it between nodes"
        yield f"each element arrives exactly once (looked at: {len(proved)} of a replica's {rollout.tp} ranks)"

    def checkpoints(self) -> Iterator[str]:
        """Whether the folder can be written to and has room, and what the run would continue from."""
        config, trainer = self.config, self.config.trainer
        if trainer.save_freq > 0:
            for finding in check_checkpoint_room(needs_of(config)):
                if finding.status is Status.FAIL:
                    raise CheckpointError(f"trainer.default_local_dir: {finding.found}; {finding.remedy}")
                yield f"{finding.found}; {finding.remedy}" if finding.remedy else finding.found
            yield f"one every {trainer.save_freq} steps, in {trainer.default_local_dir}"
        else:
            yield "none is saved (trainer.save_freq=-1)"
        resume = find_resume(config)
        yield f"continues from {resume.path}, after step {resume.state.step}" if resume else "begins at step 0"

    def trackers(self) -> Iterator[str]:
        """Whether they are known and installed; none is opened."""
        check_trackers(self.config.trainer.logger)
        yield ", ".join(self.config.trainer.logger) or "none"

    def _rollout(self) -> RolloutLayout:
        rollout = self.config.actor_rollout_ref.rollout
        return RolloutLayout(tp=rollout.tensor_model_parallel_size, replicas=rollout.replicas or 1)

    def _answered_row(self) -> tuple[DataProto, str]:
        """The first prompt with its ground truth as the answer, and that answer."""
        tokenizer, row = self._needed(self._tokenizer, "tokenizer"), self._needed(self._prompts, "data")[:1]
        told = row.non_tensor_batch["reward_model"][0]
        answer = str(told.get("ground_truth") if hasattr(told, "get") else told)
        ids = tokenizer.encode(answer, add_special_tokens=False) or [tokenizer.eos_token_id]
        responses = torch.tensor([ids])
        mask = torch.cat([row.batch["attention_mask"], torch.ones_like(responses)], 1)
        tensors = {"prompts": row.batch["prompts"], "responses": responses, "attention_mask": mask}
        return DataProto.from_dict(tensors, {**row.non_tensor_batch, "uid": np.array(["0"], dtype=object)}), answer

    @staticmethod
    def _needed(found: Any, part: str) -> Any:
        if found is None:
            raise ConfigError(f"needs what '{part}' did not give; repair that first")
        return found


def _weights(path: str) -> str:
    """Whether a folder has its weights, which only their headers are read of."""
    if not any((Path(path) / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return f"{path} has no weights: not checked, and the run will need them"
    folder = check_model_folder(path)
    size = sum(os.path.getsize(file) for file in {entry.file for entry in folder.tensors.values()})
    return f"{path} has its weights whole: {len(folder.tensors)} tensors, {size / GIB:.2f} GiB"


def _lengths(batch: DataProto) -> str:
    assert batch.batch is not None
    lengths = batch.batch["attention_mask"].sum(-1)
    low, mean, high = int(lengths.min()), float(lengths.float().mean()), int(lengths.max())
    return f"{len(batch)} prompts of {low} to {high} tokens, {mean:.0f} on average"


def _services(config: TrainConfig, names: list[str]) -> str:
    """Services that functions ask, which may cost money or be reachable from the cluster only."""
    keys = config.reward_model
    asked = [str(keys.judge.base_url)] if "judge" in names else []
    return ", ".join(asked + ([str(keys.sandbox_fusion.url)] if "code" in names and keys.sandbox_fusion.url else []))
