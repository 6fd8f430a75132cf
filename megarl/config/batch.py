"""Batch arithmetic: how a training step's prompts become samples, mini-batches and micro-batches on each rank.

A *prompt* is a row of the data, a *sample* one answer to it. ``train_batch_size`` and ``ppo_mini_batch_size`` count
prompts; a mini-batch is what one optimizer step sees, over all data-parallel ranks. Only micro-batches, which never
change the result, are sized per device. Every division has to come out; what does not is refused with the numbers
that would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from megarl.config.parts import MegatronConfig
from megarl.config.problems import InvalidConfigError, Problem, value_at
from megarl.config.schema import ScoredConfig, TrainConfig
from megarl.config.supervised import SupervisedConfig


@dataclass(frozen=True)
class MicroBatches:
    """How one rank's share is cut: a fixed number of samples, or a token budget; exactly one of them is set."""

    samples: int | None = None
    max_tokens: int | None = None  # over all devices that share a sequence (context parallelism)
    multiple: int = 1  # of which the number of micro-batches is a multiple, as the interleaved schedule needs it
    share_prompts: bool = False  # whether samples of one prompt go together, to compute it once


@dataclass(frozen=True)
class PhasePlan:
    """One model pass over a training step's samples: an update, or a forward that computes log-probs or values."""

    name: str
    layout: str
    data_parallel_size: int
    epochs: int  # passes over the samples
    mini_batches: int  # per epoch; 1 where nothing is updated
    prompts_per_mini_batch: int | None  # None where rows are samples from the start (supervised fine-tuning)
    samples_per_mini_batch: int
    micro: MicroBatches
    updates: bool

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per training step."""
        return self.epochs * self.mini_batches if self.updates else 0

    @property
    def samples_per_rank(self) -> int:
        """Samples of a mini-batch that one data-parallel rank computes; on average, where a token budget cuts them.

        All divide but those of a reward model, which are filled up.
        """
        return -(-self.samples_per_mini_batch // self.data_parallel_size)

    @property
    def micro_batches_per_rank(self) -> int | None:
        """Micro-batches per mini-batch and data-parallel rank; None where it depends on the lengths."""
        return None if self.micro.samples is None else -(-self.samples_per_rank // self.micro.samples)


@dataclass(frozen=True)
class BatchPlan:
    """A training step in numbers."""

    prompts_per_step: int
    samples_per_prompt: int
    phases: tuple[PhasePlan, ...]

    @property
    def samples_per_step(self) -> int:
        """Samples that a training step learns from."""
        return self.prompts_per_step * self.samples_per_prompt

    def phase(self, name: str) -> PhasePlan:
        """The plan of a phase.

        Raises:
            KeyError: the job has no such phase.
        """
        return {phase.name: phase for phase in self.phases}[name]


def plan_batches(config: TrainConfig | SupervisedConfig) -> BatchPlan:
    """Works out a training step's batches.

    Args:
        config: complete, as ``build`` returns it.

    Raises:
        InvalidConfigError: with every division that does not come out.
    """
    planner = _Planner(config)
    plan = planner.train(config) if isinstance(config, TrainConfig) else planner.supervised(config)
    if planner.problems:
        raise InvalidConfigError(planner.problems)
    return plan


def batch_problems(config: TrainConfig | SupervisedConfig) -> list[Problem]:
    """Every division that does not come out; empty where :func:`plan_batches` would succeed."""
    try:
        plan_batches(config)
    except InvalidConfigError as error:
        return list(error.problems)
    return []


def reward_micro_batches(config: ScoredConfig) -> MicroBatches:
    """How a rank's sequences are cut for the reward model; batches of any size are scored.

    Args:
        config: complete, with ``reward_model.enable``.

    Raises:
        InvalidConfigError: the budget does not hold the longest sequence, or is not set.
    """
    planner = _Planner(config)
    micro = planner.reward_model(config)
    if planner.problems:
        raise InvalidConfigError(planner.problems)
    return micro


def reward_batch_problems(config: ScoredConfig) -> list[Problem]:
    """What :func:`reward_micro_batches` would refuse."""
    planner = _Planner(config)
    if config.reward_model.enable:
        planner.reward_model(config)
    return planner.problems


class _MicroKeys(NamedTuple):
    """Paths of the three keys that size micro-batches."""

    dynamic: str
    max_tokens: str
    samples: str


_UPDATE_KEYS = _MicroKeys("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
_LOG_PROB_KEYS = _MicroKeys(
    *(f"log_prob_{name}" for name in ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu"))
)
_REWARD_KEYS = _MicroKeys("use_dynamic_bsz", "forward_max_token_len_per_gpu", "micro_batch_size_per_gpu")
_SUPERVISED_KEYS = _MicroKeys("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")


class _Longest(NamedTuple):
    """The longest possible sample: the keys that say it, and its tokens."""

    name: str
    tokens: int


class _Planner:
    """Divides, and notes what does not divide."""

    def __init__(self, config: ScoredConfig | SupervisedConfig) -> None:
        self.config = config
        self.problems: list[Problem] = []

    def train(self, config: TrainConfig) -> BatchPlan:
        policy, critic, prompts = config.actor_rollout_ref, config.critic, config.data.train_batch_size
        actor_path, rollout_path, ref_path = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
        reference_layout = policy.ref.megatron or policy.actor.megatron
        phases = [self._forward("old_log_prob", policy.actor.megatron, rollout_path)]
        if config.reward_model.enable:
            phases.insert(0, self._reward_phase(config))
        if config.uses_reference:
            phases.append(self._forward("ref_log_prob", reference_layout, ref_path))
        if config.uses_critic:
            phases.append(self._update("critic", critic.megatron, "critic"))
        phases.append(self._update("actor", policy.actor.megatron, actor_path))
        return BatchPlan(prompts, config.samples_per_prompt, tuple(phases))

    def reward_model(self, config: ScoredConfig) -> MicroBatches:
        """How the reward model's sequences are cut."""
        keys, megatron = config.reward_model, config.reward_model.megatron
        assert keys.max_length is not None, "filled in"
        micro = self._micro(
            "reward_model", _REWARD_KEYS, megatron, None, _Longest("reward_model.max_length", keys.max_length)
        )
        same_tokens = keys.model.input_tokenizer is None and megatron.context_parallel_size == 1
        return replace(micro, share_prompts=same_tokens)

    def _reward_phase(self, config: TrainConfig) -> PhasePlan:
        """The plan of the reward model's pass over all answers, also those that are not learned from."""
        prompts, answers = config.data.train_batch_size, config.answers_per_prompt
        megatron, micro = config.reward_model.megatron, self.reward_model(config)
        dp = megatron.data_parallel_size or 1
        return PhasePlan("reward_model", _layout(megatron), dp, 1, 1, prompts, prompts * answers, micro, False)

    def supervised(self, config: SupervisedConfig) -> BatchPlan:
        size, dp = config.data.train_batch_size, config.megatron.data_parallel_size
        if dp is not None:
            self._divides("data.train_batch_size", size, dp, f"samples do not divide over {_ranks(dp)}", dp)
        count = config.sequences_per_row
        longest = _Longest(
            f"{count} x data.max_length" if count > 1 else "data.max_length", count * config.data.max_length
        )
        micro = self._micro("data", _SUPERVISED_KEYS, config.megatron, _share(size, dp), longest)
        phase = PhasePlan(config.role, _layout(config.megatron), dp or 1, 1, 1, None, size, micro, True)
        return BatchPlan(size, 1, (phase,))

    def _update(self, name: str, megatron: MegatronConfig, path: str) -> PhasePlan:
        """The plan of an actor's or critic's update; what concerns a layout that is itself refused is left out."""
        prompts, n, dp = *self._step(), megatron.data_parallel_size
        mini_path = f"{path}.ppo_mini_batch_size"
        mini: int = value_at(self.config, mini_path)
        epochs: int = value_at(self.config, f"{path}.ppo_epochs")
        text = f"prompts do not divide into mini-batches of {mini} ({mini_path})"
        self._divides("data.train_batch_size", prompts, mini, text, mini)
        self._divides_samples(mini_path, mini, n, dp)
        micro = self._micro(path, _UPDATE_KEYS, megatron, _share(mini * n, dp), self._longest())
        micro = self._sharing(micro, megatron, path)
        return PhasePlan(name, _layout(megatron), dp or 1, epochs, prompts // mini, mini, mini * n, micro, True)

    def _forward(self, name: str, megatron: MegatronConfig, path: str) -> PhasePlan:
        """The plan of a pass without update over all samples of a step."""
        prompts, n, dp = *self._step(), megatron.data_parallel_size
        self._divides_samples("data.train_batch_size", prompts, n, dp)
        micro = self._micro(path, _LOG_PROB_KEYS, megatron, _share(prompts * n, dp), self._longest())
        micro = self._sharing(micro, megatron, "actor_rollout_ref.actor")
        return PhasePlan(name, _layout(megatron), dp or 1, 1, 1, prompts, prompts * n, micro, False)

    def _step(self) -> tuple[int, int]:
        """Prompts per step, samples per prompt."""
        return value_at(self.config, "data.train_batch_size"), value_at(self.config, "samples_per_prompt")

    def _longest(self) -> _Longest:
        """The longest possible sample."""
        prompt, response = "data.max_prompt_length", "data.max_response_length"
        return _Longest(f"{prompt} + {response}", value_at(self.config, prompt) + value_at(self.config, response))

    def _micro(
        self, path: str, keys: _MicroKeys, megatron: MegatronConfig, share: int | None, longest: _Longest
    ) -> MicroBatches:
        """Checks and returns how a rank's ``share`` of samples is cut; a share of None is not whole."""
        keys = _MicroKeys(*(f"{path}.{key}" for key in keys))
        dynamic, max_tokens, samples = (value_at(self.config, key) for key in keys)
        interleaved = (megatron.virtual_pipeline_model_parallel_size or 1) > 1
        multiple = megatron.pipeline_model_parallel_size if interleaved else 1
        if not dynamic:
            self._check_samples(keys, samples, share, multiple)
            return MicroBatches(samples=samples, multiple=multiple)
        if samples is not None:
            self._note(keys.samples, f"has no effect while {keys.dynamic}=true; leave it null or set that to false")
        max_tokens *= megatron.context_parallel_size
        self._check_tokens(keys, max_tokens, megatron.context_parallel_size, share, longest, multiple)
        return MicroBatches(max_tokens=max_tokens, multiple=multiple)

    def _sharing(self, micro: MicroBatches, megatron: MegatronConfig, path: str) -> MicroBatches:
        """The same, with samples of one prompt together where there are several and a layout that can share prompts."""
        several = value_at(self.config, "samples_per_prompt") > 1
        wanted = several and megatron.context_parallel_size == 1
        return replace(micro, share_prompts=wanted and value_at(self.config, f"{path}.use_prefix_grouper"))

    def _check_samples(self, keys: _MicroKeys, samples: int | None, share: int | None, multiple: int) -> None:
        """Whether micro-batches of a fixed number of samples come out, ``multiple`` by ``multiple``."""
        if samples is None:
            self._note(keys.samples, f"must be set while {keys.dynamic}=false")
        elif share is not None and share % (samples * multiple):
            fitting = [d for d in range(1, share + 1) if share % (d * multiple) == 0]
            near = " and ".join(map(str, sorted(sorted(fitting, key=lambda d: abs(d - samples))[:2])))
            text = f"does not divide the {share} samples that a data-parallel rank computes at a time"
            if multiple > 1:
                text += (
                    f" into a multiple of {multiple} micro-batches, which {multiple} interleaved pipeline stages need"
                )
            self._note(keys.samples, f"{text}; nearest that do: {near}" if near else f"{text}; no number does")

    def _check_tokens(
        self, keys: _MicroKeys, max_tokens: int, devices: int, share: int | None, longest: _Longest, multiple: int
    ) -> None:
        """Whether a budget of tokens over ``devices`` holds every sample, and shares can always be cut as they must.

        First-fit opens a further micro-batch only when none has room for a sample, so all but the last have at least
        as many samples as the budget has room for samples of the longest kind.
        """
        if max_tokens < longest.tokens:
            per_device = "" if devices == 1 else f", on {devices} devices: {-(-longest.tokens // devices)} on each"
            self._note(
                keys.max_tokens, f"must hold the longest sample, {longest.name} = {longest.tokens} tokens{per_device}"
            )
        elif share is not None:
            most = -(-share // (max_tokens // longest.tokens))
            if -(-most // multiple) * multiple > share:
                self._note(
                    keys.max_tokens,
                    f"can make {most} micro-batches of the {share} samples that a data-parallel rank computes at a "
                    f"time, which cannot be divided into a multiple of {multiple} as {multiple} interleaved pipeline "
                    f"stages need it; raise the budget, or the batch size to a multiple of {multiple} samples per rank",
                )

    def _divides_samples(self, path: str, prompts: int, n: int, dp: int | None) -> None:
        if dp is None:
            return
        which = (
            "algorithm.best_of_n.keep"
            if value_at(self.config, "algorithm.best_of_n.enable")
            else "actor_rollout_ref.rollout.n"
        )
        what = f"prompts x {_count(n, 'sample')} each ({which}) = {_count(prompts * n, 'sample')}"
        self._divides(path, prompts * n, dp, f"{what} do not divide over {_ranks(dp)}", dp // math.gcd(dp, n))

    def _divides(self, path: str, amount: int, parts: int, text: str, step: int) -> None:
        """Notes a problem where ``amount`` is no multiple of ``parts``; multiples of ``step`` would be right."""
        if amount % parts:
            value: int = value_at(self.config, path)
            below, above = value // step * step, (value // step + 1) * step
            self._note(path, f"{value} {text}; nearest that do: {f'{below} and ' if below else ''}{above}")

    def _note(self, path: str, text: str) -> None:
        problem = Problem.at(self.config, path, text)
        if problem not in self.problems:
            self.problems.append(problem)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _share(samples: int, dp: int | None) -> int | None:
    """Samples per data-parallel rank, or None where they do not divide."""
    return None if dp is None or samples % dp else samples // dp


def _ranks(dp: int) -> str:
    return f"{dp} data-parallel ranks"


def _layout(megatron: MegatronConfig) -> str:
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    others = {
        "CP": megatron.context_parallel_size,
        "EP": megatron.expert_model_parallel_size,
        "VPP": megatron.virtual_pipeline_model_parallel_size or 1,
    }
    more = "".join(f" {name}{size}" for name, size in others.items() if size > 1)
    return f"TP{tp} PP{pp} DP{megatron.data_parallel_size}{more}"


_TITLES = {
    "reward_model": "reward model",
    "old_log_prob": "actor log-probs",
    "ref_log_prob": "reference log-probs",
    "critic": "critic update",
    "actor": "actor update",
    "sft": "update",
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
    """The plan as a table of plain text, each number with its unit."""
    if plan.samples_per_prompt == 1 and all(phase.prompts_per_mini_batch is None for phase in plan.phases):
        head = f"One training step: {_count(plan.samples_per_step, 'sample')}"
    else:
        head = (
            f"One training step: {_count(plan.prompts_per_step, 'prompt')} x "
            f"{_count(plan.samples_per_prompt, 'sample')} each = {_count(plan.samples_per_step, 'sample')}"
        )
    rows = [("", [_TITLES[phase.name] for phase in plan.phases])]
    for label, read in _ROWS:
        cells = ["-" if value is None else str(value) for value in map(read, plan.phases)]
        if set(cells) != {"-"}:
            rows.append((label, cells))
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(plan.phases))]
    width = max(len(label) for label, _ in rows)
    lines = [
        f"  {label:<{width}}" + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths, strict=True))
        for label, cells in rows
    ]
    return "\n".join([head, *lines])
