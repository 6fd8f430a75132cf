"""A policy that does not change, as evaluation and generation have it: its replicas, its tokenizer, its rollout."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from megarl.cluster import PlacedPool, WorkerGroup, wait_ready
from megarl.config import EvaluateConfig, GenerateConfig
from megarl.rollout.endpoint import Endpoint
from megarl.trainer.evaluated_model import EvaluatedModel
from megarl.trainer.replicas import restart_replicas, rollout_group, router_replicas
from megarl.trainer.rollout import RolloutPhase
from megarl.trainer.session import load_tokenizer

CONVERTED = "converted"
"""Folder for checkpoints that were made Hugging Face folders, beside the run's."""
STREAM = 0
"""Of random numbers: equal weights give equal answers, whatever checkpoint they are in."""


class FrozenReplicas:
    """Rollout replicas with the weights of a folder, started and loaded.

    Args:
        config: complete; its model path is a Hugging Face folder.
        pool: devices to live on.

    Raises:
        WorkerError: a process failed.
    """

    def __init__(self, config: EvaluateConfig | GenerateConfig, pool: PlacedPool) -> None:
        self.group: WorkerGroup = rollout_group(config.actor_rollout_ref, config.trainer.device, pool)
        wait_ready([self.group])
        self.group.init_model()
        self.group.load_hf()

    def replace(self, lost: Collection[int]) -> None:
        """Put new processes with the same weights in the place of lost ones.

        Raises:
            WorkerError: a new process failed.
        """
        self.group.submit_on(restart_replicas(self.group, lost), "load_hf").result()


def describe(config: EvaluateConfig | GenerateConfig, model: EvaluatedModel) -> str:
    """Which model it is, and how answers are sampled, in a line of text."""
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}"
    if sampling.temperature and sampling.top_k != -1:
        how += f", top_k {sampling.top_k}"
    answers = "1 answer" if sampling.n == 1 else f"{sampling.n} answers"
    return f"{model.source.path}, step {model.step}: {answers} per prompt, {how}"


def policy_tokenizer(config: EvaluateConfig | GenerateConfig, model: EvaluatedModel) -> PreTrainedTokenizerBase:
    """The one that the configuration names, or the model's own."""
    keys = config.actor_rollout_ref.model
    if keys.tokenizer_path == keys.path:
        keys.tokenizer_path = str(model.tokenizer_folder)
    return load_tokenizer(str(keys.tokenizer_path))


def frozen_rollout(
    config: EvaluateConfig | GenerateConfig,
    replicas: FrozenReplicas,
    tokenizer: PreTrainedTokenizerBase,
    endpoint: Endpoint | None,
) -> RolloutPhase:
    """Generation by replicas whose weights stay; lost ones are replaced.

    Args:
        config: complete.
        replicas: who generates.
        tokenizer: of the policy.
        endpoint: listening; None = nobody else asks.
    """
    return RolloutPhase(router_replicas(replicas.group), config, tokenizer, on_lost=replicas.replace, endpoint=endpoint)
