"""Whether engine and actor compute the same model: their log-probs in a run's first step, against rounding.

A layer, a scale or a weight that only one of them gets wrong shows nowhere else: generation is fluent, the loss falls.
Kernels that add in another order explain a difference per token, too, so the bound depends on the number formats.

The statistic is the mean over tokens of ``abs(log p_engine - log p_actor)``, in nats. Another model moves most tokens,
while rounding moves few of them far: the largest difference says little, since near ties of a router or of two tokens
reach several nats in a healthy run. Both sides have the sampling temperature and the whole vocabulary, so ``top_p``,
``top_k`` and ``min_p`` do not enter. Three standard errors are subtracted, so that few tokens do not decide.

Measured means are 0.01 for a dense model in bfloat16, and 0.04 to 0.07 with FP8 in the engine or the actor
(https://github.com/vllm-project/vime/issues/64, https://github.com/radixark/miles/issues/2722); NeMo RL accepts 0.05.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megarl.algorithms.moments import Moments
from megarl.config.schema.jobs import TrainConfig
from megarl.models import ModelConfig

EXCESS = "training/rollout_mismatch_excess"
"""Metric of the first step: the mean difference, over the largest that rounding explains."""
DIFFERENCE = "training/rollout_log_probs_diff_mean"
ROUNDING = {"float32": 0.005, "bfloat16": 0.05}
"""Largest mean difference that rounding explains, in nats, by number format."""
QUANTIZED = 0.15
"""The same for an engine with weights or a KV cache of 8 bits, and for running servers, whose formats are unknown."""
ROUTED = 2.0
"""Factor for a mixture of experts: rounding sends some tokens to other experts."""


def explained_by_rounding(config: TrainConfig, model: ModelConfig) -> float:
    """Return the largest mean difference of the log-probs that rounding explains, in nats.

    A low temperature multiplies all differences of the logits. A repetition penalty enters the engine's log-probs only,
    so nothing can be said: infinity.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.megatron
    if rollout.repetition_penalty != 1:
        return math.inf
    chosen = rollout.engine_kwargs.sglang.server_args.values()
    narrow = (
        rollout.quantization or rollout.server_urls or any("fp" in value for value in chosen if isinstance(value, str))
    )
    bound = QUANTIZED if narrow else max(ROUNDING[actor.dtype], ROUNDING[rollout.dtype])
    return bound * (1 if model.experts is None else ROUTED) * max(1.0, 1 / rollout.temperature)


def mismatch_excess(differences: Moments, explained: float) -> float:
    """Return the mean difference, less three standard errors, over the explained one.

    Args:
        differences: of ``abs(log p_engine - log p_actor)`` over tokens that the current weights sampled.
        explained: see :func:`explained_by_rounding`.
    """
    error = math.sqrt(differences.sample_variance / max(1, differences.count))
    return max(0.0, differences.mean - 3 * error) / explained if math.isfinite(differences.mean) else math.inf


def mismatch_warnings(metrics: Mapping[str, float]) -> list[str]:
    """Describe a mismatch beyond rounding in one sentence; empty without one."""
    if not metrics.get(EXCESS, 0.0) > 1:
        return []
    return [
        f"the log-probs of engine and actor differ by {metrics[DIFFERENCE]:.3g} nats per token on average, "
        f"{metrics[EXCESS]:.1f} times what rounding explains: they compute different models, or sample otherwise. The "
        "policy would be trained on samples of another one. `megarl doctor logprobs` finds the cause from a run with "
        "actor_rollout_ref.rollout.calculate_log_probs=true and trainer.rollout_data_dir"
    ]
