"""Batch arithmetic: a training step's prompts as samples, mini-batches and micro-batches on each rank.

A *prompt* is a row of the data, a *sample* one response to it. ``train_batch_size`` and ``ppo_mini_batch_size`` count
prompts; a mini-batch is one optimizer step over all data-parallel ranks. Only micro-batches, which never change the
result, are sized per device. Every division must be exact; a problem names the nearest numbers that divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from megarl.base.formatting import count_noun, table_lines
from megarl.config.problems import InvalidConfigError, Problem
from megarl.config.schema.algorithm import SYNC
from megarl.config.schema.data import SupervisedDataConfig
from megarl.config.schema.jobs import ScoredJobConfig, SupervisedConfig, TrainConfig
from megarl.config.schema.model import LogProbBatchConfig, MegatronConfig, UpdateBatchConfig
from megarl.config.schema.rewards import ScoringModelConfig
from megarl.config.schema.roles import ActorConfig, CriticConfig

_count = partial(count_noun, grouping=False)


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches of one rank: a fixed number of samples or a token budget; exactly one of them is set."""

    samples: int | None = None
    max_tokens: int | None = None  # over all devices that share a sequence (context parallelism)
    multiple: int = 1  # the number of micro-batches is a multiple of this, as the interleaved schedule needs
    share_prompts: bool = False  # whether samples of one prompt stay together, to compute the prompt once


@dataclass(frozen=True)
class PhasePlan:
    """One model pass over a training step's samples: an update, or a forward for log-probs or values."""

    name: str
    layout: str
    data_parallel_size: int
    epochs: int  # passes over the samples
    mini_batches: int  # per epoch; 1 without an update
    prompts_per_mini_batch: int | None  # None if rows are samples (supervised fine-tuning)
    samples_per_mini_batch: int
    micro: MicroBatches
    updates: bool

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per training step."""
        return self.epochs * self.mini_batches if self.updates else 0

    @property
    def samples_per_rank(self) -> int:
        """Samples of a mini-batch per data-parallel rank; with a token budget, on average.

        Every phase divides evenly except the reward model, whose shares are rounded up.
        """
        return -(-self.samples_per_mini_batch // self.data_parallel_size)

    @property
    def micro_batches_per_rank(self) -> int | None:
        """Micro-batches per mini-batch and data-parallel rank; None if it depends on the lengths."""
        return None if self.micro.samples is None else -(-self.samples_per_rank // self.micro.samples)


@dataclass(frozen=True)
class BatchPlan:
    """Prompts, samples and phases of a training step."""

    prompts_per_step: int
    samples_per_prompt: int
    phases: tuple[PhasePlan, ...]

    @property
    def samples_per_step(self) -> int:
        """Samples per training step."""
        return self.prompts_per_step * self.samples_per_prompt

    def phase(self, name: str) -> PhasePlan:
        """Return the plan of a phase.

        Raises:
            KeyError: the job has no such phase.
        """
        return {phase.name: phase for phase in self.phases}[name]


def plan_batches(config: TrainConfig | SupervisedConfig) -> BatchPlan:
    """Plan the batches of a training step.

    Raises:
        InvalidConfigError: with every division that is not exact.
    """
    planner = _Planner()
    plan = planner.train(config) if isinstance(config, TrainConfig) else planner.supervised(config)
    planner.raise_problems()
    return plan


def batch_problems(config: TrainConfig | SupervisedConfig) -> list[Problem]:
    """List the divisions that are not exact; empty if :func:`plan_batches` succeeds."""
    try:
        plan_batches(config)
    except InvalidConfigError as error:
        return list(error.problems)
    return []


_PROMPT_TOKEN_BYTES, _RESPONSE_TOKEN_BYTES = 4, 33
"""Bytes that every step stores per token. Of a response: id, mask, and in float32 the log-probs of engine and actor,
entropy, score, reward, advantage and return."""


def token_store_bytes(config: TrainConfig, teacher_hidden: int = 0) -> int:
    """Return the most bytes of token columns that a training step keeps in Ray's object store, over all nodes.

    Responses of the maximum length are assumed. The samples are on the driver's node, and results of the models on the
    nodes of their processes.

    Args:
        teacher_hidden: bytes per response token of the teachers' hidden states, for the exact KL to them; 0 without.
    """
    data, algorithm = config.data, config.algorithm
    further = (
        config.uses_reference,
        config.uses_critic,
        config.uses_sum_pi_squared,
        config.async_training.mode != SYNC,
        algorithm.rollout_correction.rollout_is is not None,
    )
    per_token = _RESPONSE_TOKEN_BYTES + 4 * sum(further) + 4 * config.actor_rollout_ref.rollout.support_tokens
    if config.distillation.enabled:  # hidden state, top tokens with log-probs, or one log-prob
        per_token += teacher_hidden or 8 * config.distillation.distillation_loss.teacher_topk or 4
    samples = data.train_batch_size * config.responses_per_prompt
    return samples * (data.max_prompt_length * _PROMPT_TOKEN_BYTES + data.max_response_length * per_token)


def reward_micro_batches(config: ScoredJobConfig) -> MicroBatches:
    """Return the micro-batch settings of the reward model, for batches of any size.

    Raises:
        InvalidConfigError: the token budget is missing or below the longest sequence.
    """
    planner = _Planner()
    micro = planner.reward_model(config)
    planner.raise_problems()
    return micro


def reward_model_problems(config: ScoredJobConfig) -> list[Problem]:
    """List the problems of :func:`reward_micro_batches`; none without a reward model."""
    planner = _Planner()
    if config.reward.model.enable:
        planner.reward_model(config)
    return planner.problems


def teacher_phase(name: str) -> str:
    """Name of a teacher's role, and of its pass in the batch plan."""
    return f"teacher_{name}"


class _Key(NamedTuple):
    path: str
    value: Any


class _MicroKeys(NamedTuple):
    dynamic: _Key
    max_tokens: _Key
    samples: _Key


class _Step(NamedTuple):
    prompts: int
    samples_per_prompt: int
    samples_key: str
    longest: _Key  # the keys of the longest possible sample, as text, and its tokens


class _Planner:
    """Plans phases and collects divisions that are not exact."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def raise_problems(self) -> None:
        if self.problems:
            raise InvalidConfigError(self.problems)

    def train(self, config: TrainConfig) -> BatchPlan:
        policy, data = config.actor_rollout_ref, config.data
        best_of_n = config.algorithm.best_of_n.enable
        step = _Step(
            prompts=data.train_batch_size,
            samples_per_prompt=config.samples_per_prompt,
            samples_key="algorithm.best_of_n.keep" if best_of_n else "actor_rollout_ref.rollout.n",
            longest=_Key(
                "data.max_prompt_length + data.max_response_length", data.max_prompt_length + data.max_response_length
            ),
        )
        actor, shared = policy.actor, policy.actor.use_prefix_grouper
        old_log_prob = _micro_keys(policy.rollout.log_prob_batch, "actor_rollout_ref.rollout", "log_prob_")
        phases = [self._forward("old_log_prob", step, actor.megatron, old_log_prob, shared)]
        if config.reward.model.enable:
            # of all responses, including those that no update trains on
            layout, micro = config.reward.model.megatron, self.reward_model(config)
            dp, samples = layout.data_parallel_size or 1, step.prompts * config.responses_per_prompt
            reward = PhasePlan("reward_model", layout.layout, dp, 1, 1, step.prompts, samples, micro, False)
            phases.insert(0, reward)
        if config.uses_reference:
            layout = policy.ref.megatron or actor.megatron
            ref_log_prob = _micro_keys(policy.ref, "actor_rollout_ref.ref")
            phases.append(self._forward("ref_log_prob", step, layout, ref_log_prob, shared))
        if config.distillation.enabled:
            phases += self._teacher_phases(config, step)
        if config.uses_critic:
            phases.append(self._update("critic", step, config.critic, "critic"))
        phases.append(self._update("actor", step, actor, "actor_rollout_ref.actor"))
        return BatchPlan(step.prompts, step.samples_per_prompt, tuple(phases))

    def reward_model(self, config: ScoredJobConfig) -> MicroBatches:
        keys, path = config.reward.model, "reward.model"
        megatron = keys.megatron
        assert keys.max_length is not None, "derived"
        longest = _Key(f"{path}.max_length", keys.max_length)
        micro = self._micro(_micro_keys(keys, path), megatron, None, longest)
        same_tokens = keys.input_tokenizer is None and megatron.context_parallel_size == 1
        return replace(micro, share_prompts=same_tokens)

    def _teacher_phases(self, config: TrainConfig, step: _Step) -> Iterator[PhasePlan]:
        """Passes of the teachers; with several, each computes a part of the samples that depends on the data."""
        samples, shared = step.prompts * step.samples_per_prompt, config.actor_rollout_ref.actor.use_prefix_grouper
        for name, teacher in config.distillation.local_teachers.items():
            megatron = teacher.megatron
            keys = _micro_keys(teacher, f"distillation.teacher_models.{name}")
            micro = self._micro(keys, megatron, None, step.longest)
            micro = _with_shared_prompts(micro, megatron, shared)
            dp = megatron.data_parallel_size or 1
            yield PhasePlan(teacher_phase(name), megatron.layout, dp, 1, 1, step.prompts, samples, micro, False)

    def supervised(self, config: SupervisedConfig) -> BatchPlan:
        data, megatron = config.data, config.megatron
        size, dp = _Key("data.train_batch_size", data.train_batch_size), megatron.data_parallel_size
        if dp is not None:
            text = f"samples do not divide over {_ranks(dp)}"
            self._divides(size, size.value, dp, text, dp, code="batch.samples-per-rank")
        count = config.sequences_per_row
        name = f"{count} x data.max_length" if count > 1 else "data.max_length"
        sizes = _micro_keys(data, "data")
        micro = self._micro(sizes, megatron, _share(size.value, dp), _Key(name, count * data.max_length))
        phase = PhasePlan(config.role, megatron.layout, dp or 1, 1, 1, None, size.value, micro, True)
        return BatchPlan(size.value, 1, (phase,))

    def _update(self, name: str, step: _Step, keys: ActorConfig | CriticConfig, path: str) -> PhasePlan:
        """The update of actor or critic; a refused layout causes no further problems here."""
        assert keys.ppo_mini_batch_size is not None and keys.ppo_epochs is not None, "derived"
        megatron, n, dp = keys.megatron, step.samples_per_prompt, keys.megatron.data_parallel_size
        mini = _Key(f"{path}.ppo_mini_batch_size", keys.ppo_mini_batch_size)
        text = f"prompts do not divide into mini-batches of {mini.value} ({mini.path})"
        size = _Key("data.train_batch_size", step.prompts)
        self._divides(size, step.prompts, mini.value, text, mini.value, code="batch.mini-batch-size")
        self._divides_samples(mini, step, dp)
        samples = mini.value * n
        micro = self._micro(_micro_keys(keys, path), megatron, _share(samples, dp), step.longest)
        micro = _with_shared_prompts(micro, megatron, keys.use_prefix_grouper)
        mini_batches = step.prompts // mini.value
        return PhasePlan(
            name, megatron.layout, dp or 1, keys.ppo_epochs, mini_batches, mini.value, samples, micro, True
        )

    def _forward(
        self, name: str, step: _Step, megatron: MegatronConfig, keys: _MicroKeys, share_prompts: bool
    ) -> PhasePlan:
        """A pass without update over all samples of a step."""
        prompts, dp = step.prompts, megatron.data_parallel_size
        samples = prompts * step.samples_per_prompt
        self._divides_samples(_Key("data.train_batch_size", prompts), step, dp)
        micro = self._micro(keys, megatron, _share(samples, dp), step.longest)
        micro = _with_shared_prompts(micro, megatron, share_prompts)
        return PhasePlan(name, megatron.layout, dp or 1, 1, 1, prompts, samples, micro, False)

    def _micro(self, keys: _MicroKeys, megatron: MegatronConfig, share: int | None, longest: _Key) -> MicroBatches:
        """Check and return the micro-batches of a rank's ``share`` of samples; None for a share that is not whole."""
        interleaved = (megatron.virtual_pipeline_model_parallel_size or 1) > 1
        multiple = megatron.pipeline_model_parallel_size if interleaved else 1
        samples: int | None = keys.samples.value
        if not keys.dynamic.value:
            self._check_samples(keys, share, multiple)
            return MicroBatches(samples=samples, multiple=multiple)
        if samples is not None:
            text = f"has no effect while {keys.dynamic.path}=true; remove it, or set that to false"
            self._add(keys.samples, text, code="batch.unused-micro-batch-size")
        devices = megatron.context_parallel_size
        budget: int = keys.max_tokens.value * devices
        self._check_tokens(keys.max_tokens, budget, devices, share, longest, multiple)
        return MicroBatches(max_tokens=budget, multiple=multiple)

    def _check_samples(self, keys: _MicroKeys, share: int | None, multiple: int) -> None:
        """Check that micro-batches of a fixed number of samples divide the share into a multiple of ``multiple``."""
        samples: int | None = keys.samples.value
        if samples is None:
            text = f"must be set while {keys.dynamic.path}=false"
            self._add(keys.samples, text, code="batch.no-micro-batch-size")
        elif share is not None and share % (samples * multiple):
            divisors = [d for d in range(1, share + 1) if share % (d * multiple) == 0]
            near = " and ".join(map(str, sorted(sorted(divisors, key=lambda d: abs(d - samples))[:2])))
            text = f"does not divide the {share} samples that a data-parallel rank computes at a time"
            if multiple > 1:
                text += (
                    f" into a multiple of {multiple} micro-batches, which {multiple} interleaved pipeline stages need"
                )
            text = f"{text}; nearest that do: {near}" if near else f"{text}; no number does"
            self._add(keys.samples, text, code="batch.micro-batch-division")

    def _check_tokens(
        self, key: _Key, budget: int, devices: int, share: int | None, longest: _Key, multiple: int
    ) -> None:
        """Check that a token budget over ``devices`` holds every sample, and that every share can be cut as required.

        First-fit opens another micro-batch only if none has room for a sample. All micro-batches but the last therefore
        hold at least as many samples as the budget holds samples of the longest kind.
        """
        if budget < longest.value:
            per_device = "" if devices == 1 else f", on {devices} devices: {-(-longest.value // devices)} on each"
            text = f"must hold the longest sample, {longest.path} = {longest.value} tokens{per_device}"
            self._add(key, text, code="batch.token-budget")
        elif share is not None:
            most = -(-share // (budget // longest.value))
            if -(-most // multiple) * multiple > share:
                text = (
                    f"can make {most} micro-batches of the {share} samples that a data-parallel rank computes at a "
                    f"time, and {multiple} interleaved pipeline stages need a multiple of {multiple}; raise the "
                    f"budget, or the batch size to a multiple of {multiple} samples per rank"
                )
                self._add(key, text, code="batch.micro-batches-vpp")

    def _divides_samples(self, prompts: _Key, step: _Step, dp: int | None) -> None:
        if dp is None:
            return
        n = step.samples_per_prompt
        samples = prompts.value * n
        product = f"prompts x {_count(n, 'sample')} each ({step.samples_key}) = {_count(samples, 'sample')}"
        text = f"{product} do not divide over {_ranks(dp)}"
        self._divides(prompts, samples, dp, text, dp // math.gcd(dp, n), code="batch.samples-per-rank")

    def _divides(self, key: _Key, amount: int, parts: int, text: str, step: int, *, code: str) -> None:
        """Add a problem if ``amount`` is no multiple of ``parts``; multiples of ``step`` are valid values."""
        if amount % parts:
            value: int = key.value
            below, above = value // step * step, (value // step + 1) * step
            self._add(key, f"{value} {text}; nearest that do: {f'{below} and ' if below else ''}{above}", code=code)

    def _add(self, key: _Key, text: str, *, code: str) -> None:
        problem = Problem(key.path, key.value, text, code=code)
        if problem not in self.problems:
            self.problems.append(problem)


def _micro_keys(
    keys: UpdateBatchConfig | LogProbBatchConfig | SupervisedDataConfig | ScoringModelConfig,
    path: str,
    prefix: str = "",
) -> _MicroKeys:
    """The keys of a section that size its micro-batches; ``prefix`` begins their names."""
    return _MicroKeys(
        _Key(f"{path}.{prefix}use_dynamic_bsz", keys.use_dynamic_bsz),
        _Key(f"{path}.{prefix}max_token_len_per_gpu", keys.max_token_len_per_gpu),
        _Key(f"{path}.{prefix}micro_batch_size_per_gpu", keys.micro_batch_size_per_gpu),
    )


def _with_shared_prompts(micro: MicroBatches, megatron: MegatronConfig, enabled: bool) -> MicroBatches:
    """Keep samples of one prompt together, and share equal beginnings, if the layout can."""
    return replace(micro, share_prompts=enabled and megatron.context_parallel_size == 1)


def _share(samples: int, dp: int | None) -> int | None:
    """Samples per data-parallel rank, or None if they do not divide."""
    return None if dp is None or samples % dp else samples // dp


def _ranks(dp: int) -> str:
    return f"{dp} data-parallel ranks"


_TITLES = {
    "reward_model": "reward model",
    "old_log_prob": "actor log-probs",
    "ref_log_prob": "reference log-probs",
    "critic": "critic update",
    "actor": "actor update",
    "sft": "update",
    "preference": "update",
}
_ROWS: tuple[tuple[str, Callable[[PhasePlan], object]], ...] = (
    ("layout", lambda p: p.layout),
    ("epochs per training step", lambda p: p.epochs if p.updates else None),
    ("mini-batches per epoch", lambda p: p.mini_batches if p.updates else None),
    ("optimizer steps per training step", lambda p: p.optimizer_steps or None),
    ("prompts per mini-batch", lambda p: p.prompts_per_mini_batch if p.updates else None),
    ("samples per mini-batch", lambda p: p.samples_per_mini_batch if p.updates else None),
    ("samples per DP rank at a time", lambda p: p.samples_per_rank),
    ("micro-batches of that", lambda p: p.micro_batches_per_rank),
    ("samples per micro-batch", lambda p: p.micro.samples),
    ("tokens per micro-batch, at most", lambda p: p.micro.max_tokens),
)


def render_plan(plan: BatchPlan) -> str:
    """Render the plan as a text table with units, one column per phase."""
    text = f"One training step: {_count(plan.samples_per_step, 'sample')}"
    if plan.samples_per_prompt > 1 or any(phase.prompts_per_mini_batch is not None for phase in plan.phases):
        prompts, each = (
            _count(plan.prompts_per_step, "prompt"),
            _count(plan.samples_per_prompt, "sample"),
        )
        text = f"One training step: {prompts} x {each} each = {_count(plan.samples_per_step, 'sample')}"
    rows = [["", *(_TITLES.get(phase.name, phase.name.replace("_", " ", 1)) for phase in plan.phases)]]
    for label, read in _ROWS:
        cells = ["-" if value is None else str(value) for value in map(read, plan.phases)]
        if set(cells) != {"-"}:
            rows.append([label, *cells])
    return "\n".join([text, *table_lines(rows, align="<" + ">" * len(plan.phases), indent="  ")])
