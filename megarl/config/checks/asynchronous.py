"""Checks of asynchronous training and of stale samples.

They find sizes that would deadlock, missing devices of the engines, and inputs that the objective lacks: stale samples
need log-probs of the sampling policy, and a correction by them.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.base.algorithm_names import LOSSES_WITHOUT_RATIO, STALE_DATA_LOSSES
from megarl.config.problems import Problem
from megarl.config.schema.algorithm import (
    COLOCATED,
    DISAGGREGATED,
    LOGLINEAR,
    RECOMPUTE,
    SYNC,
    AsyncTrainingConfig,
)
from megarl.config.schema.jobs import TrainConfig

_ASYNC, _ROLLOUT = "async_training", "actor_rollout_ref.rollout"
_CORRECTION, _PROXIMAL = "algorithm.rollout_correction", "async_training.proximal"
_REMEDY = (
    f"{_CORRECTION}.rollout_is=token (decoupled PPO), or {_CORRECTION}.bypass_mode=true with a loss that corrects by "
    "its ratio"
)


def async_mode(config: TrainConfig) -> Iterator[Problem]:
    """Check that the keys of the section belong to its mode."""
    keys = config.async_training
    if keys.mode == SYNC:
        for name in ("max_staleness", "sync_interval"):
            value = getattr(keys, name)
            if value != getattr(AsyncTrainingConfig, name):
                text = f"has no effect with {_ASYNC}.mode=sync; set mode=disaggregated or mode=colocated"
                yield Problem(f"{_ASYNC}.{name}", value, text, code="async.no-effect-in-sync")
    if keys.sync_wave_size is not None and (keys.mode != DISAGGREGATED or not keys.partial_rollout):
        text = (
            f"has an effect only with {_ASYNC}.mode=disaggregated and partial_rollout=true, in which engines serve "
            "requests during a weight sync; leave it null"
        )
        yield Problem(f"{_ASYNC}.sync_wave_size", keys.sync_wave_size, text, code="async.wave-needs-partial-rollout")
    if keys.mode == COLOCATED and not keys.partial_rollout:
        text = f"{_ASYNC}.mode=colocated interrupts the responses in flight for training; set true, or mode=sync"
        yield Problem(f"{_ASYNC}.partial_rollout", False, text, code="async.colocated-partial-rollout")
    if keys.mode == DISAGGREGATED and not keys.partial_rollout and keys.max_staleness > 1:
        text = (
            f"with {_ASYNC}.partial_rollout=false a sync waits for all responses in flight, so more than 1 adds "
            "staleness and no overlap; set 1, or partial_rollout=true"
        )
        yield Problem(f"{_ASYNC}.max_staleness", keys.max_staleness, text, code="async.staleness-without-overlap")


def async_devices(config: TrainConfig) -> Iterator[Problem]:
    """Check that the engines have devices of their own in disaggregated mode, and only there."""
    rollout, mode = config.actor_rollout_ref.rollout, config.async_training.mode
    if mode == DISAGGREGATED and not rollout.nnodes:
        text = f"{_ASYNC}.mode=disaggregated needs devices for the engines; set nnodes and n_gpus_per_node"
        yield Problem(f"{_ROLLOUT}.nnodes", rollout.nnodes, text, code="async.no-engine-devices")
    if mode != DISAGGREGATED and rollout.nnodes:
        text = f"{_ASYNC}.mode={mode} runs the engines on the trainer's devices; set 0, or mode=disaggregated"
        yield Problem(f"{_ROLLOUT}.nnodes", rollout.nnodes, text, code="async.shared-engine-devices")


def elastic_replicas(config: TrainConfig) -> Iterator[Problem]:
    """Check that replicas that may join and leave have devices of their own, each on one node."""
    rollout, key = config.actor_rollout_ref.rollout, f"{_ROLLOUT}.min_replicas"
    least, size = rollout.min_replicas, rollout.devices_per_replica
    if least is None:
        return
    if config.async_training.mode != DISAGGREGATED:
        mode = config.async_training.mode
        text = f"replicas join and leave with {_ASYNC}.mode=disaggregated, and it is {mode}; set null"
        yield Problem(key, least, text, code="async.elastic-needs-disaggregated")
    elif least > (rollout.replicas or least):
        yield Problem(key, least, f"must be at most {_ROLLOUT}.replicas={rollout.replicas}", code="async.min-replicas")
    elif rollout.server_urls:
        text = f"the run does not start the servers of {_ROLLOUT}.engine_kwargs.sglang.urls; set null"
        yield Problem(key, least, text, code="async.elastic-server-urls")
    elif size > (rollout.n_gpus_per_node or size):
        text = f"a replica of {size} devices spans nodes of {rollout.n_gpus_per_node}, and cannot leave; set null"
        yield Problem(key, least, text, code="async.elastic-several-nodes")


def hybrid_rollout(config: TrainConfig) -> Iterator[Problem]:
    """Check that the trainer's devices can hold engine replicas besides those with devices of their own."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    key, size = f"{_ASYNC}.hybrid_rollout", rollout.devices_per_replica
    if not config.async_training.hybrid_rollout:
        return
    if config.async_training.mode != DISAGGREGATED:
        mode = config.async_training.mode
        text = f"the engines are on the trainer's devices already with {_ASYNC}.mode={mode}; set false"
        yield Problem(key, True, text, code="async.hybrid-needs-disaggregated")
    elif rollout.min_replicas is not None:
        text = f"does not work with elastic replicas, {_ROLLOUT}.min_replicas={rollout.min_replicas}; set one of them"
        yield Problem(key, True, text, code="async.hybrid-elastic")
    elif rollout.server_urls:
        text = f"the run does not start the servers of {_ROLLOUT}.engine_kwargs.sglang.urls; set false"
        yield Problem(key, True, text, code="async.hybrid-server-urls")
    elif trainer.n_gpus_per_node % size or (rollout.n_gpus_per_node or size) % size:
        text = f"replicas of {size} devices must divide trainer.n_gpus_per_node={trainer.n_gpus_per_node} and "
        text += f"{_ROLLOUT}.n_gpus_per_node={rollout.n_gpus_per_node}"
        yield Problem(key, True, text, code="async.hybrid-replica-size")


def async_sizes(config: TrainConfig) -> Iterator[Problem]:
    """Check that mini-batches fill the prompts between two syncs: otherwise the last would wait forever."""
    keys, batch = config.async_training, config.data.train_batch_size
    size = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if keys.mode == DISAGGREGATED and keys.sync_interval * size != batch:
        product = f"{keys.sync_interval} x actor_rollout_ref.actor.ppo_mini_batch_size={size}"
        prompts = keys.sync_interval * size
        works = f"set {batch // size}" if batch % size == 0 else f"set data.train_batch_size={prompts}"
        text = f"{product} = {prompts} prompts are not data.train_batch_size={batch}; {works}"
        yield Problem(f"{_ASYNC}.sync_interval", keys.sync_interval, text, code="async.prompts-per-sync")
    if keys.mode == COLOCATED and keys.sync_interval != 1:
        text = f"with {_ASYNC}.mode=colocated the engines get the weights before they continue, once per step; set 1"
        yield Problem(f"{_ASYNC}.sync_interval", keys.sync_interval, text, code="async.colocated-sync-interval")
    critic = config.critic.ppo_mini_batch_size
    if keys.sync_interval > 1 and config.uses_critic and critic is not None and size % critic:
        text = f"must divide actor_rollout_ref.actor.ppo_mini_batch_size={size}, the prompts that arrive at a time"
        yield Problem("critic.ppo_mini_batch_size", critic, text, code="async.critic-mini-batch")
    if keys.mode != SYNC and 0 < keys.max_staleness * batch < 1:
        text = f"admits no prompt ahead with data.train_batch_size={batch}; set 0, or at least {1 / batch:.2g}"
        yield Problem(f"{_ASYNC}.max_staleness", keys.max_staleness, text, code="async.staleness-below-prompt")


def async_algorithm(config: TrainConfig) -> Iterator[Problem]:
    """Check that dynamic sampling has its scores while conversations are in flight."""
    groups = config.algorithm.filter_groups
    if config.async_training.mode == COLOCATED and groups.enable and config.reward.model.enable:
        text = f"the reward model scores groups on devices that the engines hold in {_ASYNC}.mode=colocated; set false"
        yield Problem("algorithm.filter_groups.enable", True, text, code="async.filter-by-reward-model")


def stale_data(config: TrainConfig) -> Iterator[Problem]:
    """Check that samples of older weights get a correction; none is needed without staleness."""
    keys, correction = config.async_training, config.algorithm.rollout_correction
    if keys.mode == SYNC:
        if keys.proximal != RECOMPUTE:
            text = "a step of async_training.mode=sync has one weight version; set recompute"
            yield Problem(_PROXIMAL, keys.proximal, text, code="async.proximal-in-sync")
        return
    if keys.max_staleness == 0 and keys.sync_interval == 1:
        return
    stale = "max_staleness" if keys.max_staleness > 0 else "sync_interval"
    label = f"async_training.{stale}={getattr(keys, stale):g}"
    rollout = config.actor_rollout_ref.rollout
    if not rollout.calculate_log_probs:
        text = f"{label} needs the log-probs of the policy that sampled; set true"
        yield Problem(f"{_ROLLOUT}.calculate_log_probs", False, text, code="rollout.log-probs-needed")
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.bypass_mode and loss in LOSSES_WITHOUT_RATIO:
        names = ", ".join(("vanilla", *STALE_DATA_LOSSES))
        text = f"reads no ratio: with {_CORRECTION}.bypass_mode stale samples count like fresh ones; set one of {names}"
        yield Problem("actor_rollout_ref.actor.policy_loss.loss_mode", loss, text, code="async.loss-without-ratio")
    if config.estimates_proximal_policy:
        yield from _loglinear(config)
    elif not correction.bypass_mode and correction.rollout_is is None and correction.rollout_rs is None:
        text = f"{label} needs a correction: the ratio is about a policy that did not sample; set {_REMEDY}"
        yield Problem(f"{_CORRECTION}.rollout_is", correction.rollout_is, text, code="async.no-correction")


def _loglinear(config: TrainConfig) -> Iterator[Problem]:
    """Check the inputs of a log-linear proximal policy, and weights that are known with the loss only."""
    correction, state_masking = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.state_masking
    label, level = f"{_PROXIMAL}={LOGLINEAR}", correction.rollout_is
    if not state_masking:
        text = f"{label} needs the engine's log-prob of every trained token; set true"
        yield Problem("actor_rollout_ref.actor.state_masking", False, text, code="async.loglinear-state-masking")
    if config.algorithm.repr_align.enable:
        text = f"needs the policy's entropy, which {label} does not compute; set {_PROXIMAL}={RECOMPUTE}"
        yield Problem("algorithm.repr_align.enable", True, text, code="async.loglinear-repr-align")
    if level != "token":
        text = f"{label} knows the weights of single tokens, when it computes the loss; set token"
        yield Problem(f"{_CORRECTION}.rollout_is", level, text, code="async.loglinear-token-level")
    for name, off, word in (("rollout_rs", None, "null"), ("rollout_is_batch_normalize", False, "false")):
        if (value := getattr(correction, name)) != off:
            text = f"{label} knows the weights of a token only when it computes its loss; set {word}"
            yield Problem(f"{_CORRECTION}.{name}", value, text, code="async.loglinear-correction")
