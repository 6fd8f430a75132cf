"""Generation: from a batch of prompts to a batch of answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megarl.cluster import WorkerGroup
from megarl.config.schema import RolloutConfig, ValSamplingConfig
from megarl.data import DataProto
from megarl.rollout.interface import SamplingParams

# Keeps the streams of training and validation apart.
TRAINING, VALIDATION = 0, 1


class RolloutPhase:
    """Asks the rollout workers for answers.

    What is drawn for a prompt depends on the seed, the step, the prompt's place in the step's batch and the sample's
    number, and on nothing else: not on replicas, not on batching.

    Args:
        workers: the engine's replicas.
        config: sampling, samples per prompt, seed.
        max_response_length: longest answer, in tokens.
        facts: what a training batch tells the verbs that it is passed to, such as rows per mini-batch.
    """

    def __init__(
        self, workers: WorkerGroup, config: RolloutConfig, max_response_length: int, facts: Mapping[str, Any]
    ) -> None:
        self.workers = workers
        self.config = config
        self.max_response_length = max_response_length
        self.facts = facts

    def generate_sequences(self, prompts: DataProto, step: int) -> DataProto:
        """``n`` answers to each prompt, adjacent rows, with ``uid`` naming the prompt."""
        batch = self._generate(prompts, self.config, self.config.n, (TRAINING, step))
        batch.meta_info |= self.facts
        return batch

    def validate(self, prompts: DataProto, step: int, batch: int = 0) -> DataProto:
        """Answers as validation samples them; ``batch`` numbers the validation batches of a step."""
        sampling = self.config.val_kwargs
        return self._generate(prompts, sampling, sampling.n, (VALIDATION, step, batch))

    def _generate(
        self, prompts: DataProto, sampling: RolloutConfig | ValSamplingConfig, samples: int, stream: tuple[int, ...]
    ) -> DataProto:
        params = SamplingParams(
            max_new_tokens=self.max_response_length,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        seeds = np.random.default_rng([self.config.seed or 0, *stream]).integers(0, 2**62, len(prompts))
        asked = prompts.select(["prompts", "attention_mask"], []).with_columns(
            {"sample_seed": torch.from_numpy(seeds)}, {}
        )
        answers = self.workers.generate_sequences(asked, samples, params)
        facts = DataProto.from_dict(
            {}, {**prompts.non_tensor_batch, "uid": [f"{'-'.join(map(str, stream))}-{i}" for i in range(len(prompts))]}
        )
        return answers.union(facts.repeat(samples))
