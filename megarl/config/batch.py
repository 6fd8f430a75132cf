"""Batch arithmetic: how a training step's prompts become samples, mini-batches and micro-batches on each rank.

A *prompt* is a row of the data, a *sample* one answer to it. ``train_batch_size`` and ``ppo_mini_batch_size`` count
prompts; a mini-batch is what one optimizer step sees, over all data-parallel ranks. Only micro-batches, which never
change the result, are sized per device. Every division has to come out; what does not is refused with the numbers
that would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megarl.config.parts import MegatronConfig
from megarl.config.problems import InvalidConfigError, Problem, value_at
from megarl.config.schema import TrainConfig
from megarl.config.sft_schema import SFTConfig


@dataclass(frozen=True)
class MicroBatches:
    """How one rank's share is cut: a fixed number of samples, or a token budget; exactly one of them is set."""

    samples: int | None = None
    max_tokens: int | None = None


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
        """Samples of a mini-batch that one data-parallel rank computes."""
        return self.samples_per_mini_batch // self.data_parallel_size

    @property
    def micro_batches_per_rank(self) -> int | None:
        """Micro-batches per mini-batch and data-parallel rank; None where it depends on the lengths."""
        return None if self.micro.samples is None else self.samples_per_rank // self.micro.samples


@dataclass(frozen=True)
class BatchPlan:
    """A training step in numbers."""

    prompts_per_step: int
    samples_per_prompt: int
    phases: tuple[PhasePlan, ...]

    @property
    def samples_per_step(self) -> int:
        """Samples that a training step generates or reads."""
        return self.prompts_per_step * self.samples_per_prompt

    def phase(self, name: str) -> PhasePlan:
        """The plan of a phase.

        Raises:
            KeyError: the job has no such phase.
        """
        return {phase.name: phase for phase in self.phases}[name]


def plan_batches(config: TrainConfig | SFTConfig) -> BatchPlan:
    """Works out a training step's batches.

    Args:
        config: complete, as ``build`` returns it.

    Raises:
        InvalidConfigError: with every division that does not come out.
    """
    planner = _Planner(config)
    plan = planner.train(config) if isinstance(config, TrainConfig) else planner.sft(config)
    if planner.problems:
        raise InvalidConfigError(planner.problems)
    return plan


def batch_problems(config: TrainConfig | SFTConfig) -> list[Problem]:
    """Every division that does not come out; empty where :func:`plan_batches` would succeed."""
    try:
        plan_batches(config)
    except InvalidConfigError as error:
        return list(error.problems)
    return []


class _MicroKeys(NamedTuple):
    """Paths of the three keys that size micro-batches."""

    dynamic: str
    max_tokens: str
    samples: str


_UPDATE_KEYS = _MicroKeys("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
_LOG_PROB_KEYS = _MicroKeys(
    *(f"log_prob_{name}" for name in ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu"))
)
_SFT_KEYS = _MicroKeys("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")


class _Planner:
    """Divides, and notes what does not divide."""

    def __init__(self, config: TrainConfig | SFTConfig) -> None:
        self.config = config
        self.problems: list[Problem] = []

    def train(self, config: TrainConfig) -> BatchPlan:
        policy, critic, prompts = config.actor_rollout_ref, config.critic, config.data.train_batch_size
        actor_path, rollout_path, ref_path = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
        reference_layout = policy.ref.megatron or policy.actor.megatron
        phases = [self._forward("old_log_prob", policy.actor.megatron, rollout_path)]
        if config.uses_reference:
            phases.append(self._forward("ref_log_prob", reference_layout, ref_path))
        if config.uses_critic:
            phases.append(self._update("critic", critic.megatron, "critic"))
        phases.append(self._update("actor", policy.actor.megatron, actor_path))
        return BatchPlan(prompts, policy.rollout.n, tuple(phases))

    def sft(self, config: SFTConfig) -> BatchPlan:
        size, dp = config.data.train_batch_size, config.megatron.data_parallel_size
        if dp is not None:
            self._divides("data.train_batch_size", size, dp, f"samples do not divide over {_ranks(dp)}", dp)
        micro = self._micro("data", _SFT_KEYS, _share(size, dp), config.data.max_length, "data.max_length")
        phase = PhasePlan("sft", _layout(config.megatron), dp or 1, 1, 1, None, size, micro, True)
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
        micro = self._micro(path, _UPDATE_KEYS, _share(mini * n, dp), self._longest(), _LONGEST)
        return PhasePlan(name, _layout(megatron), dp or 1, epochs, prompts // mini, mini, mini * n, micro, True)

    def _forward(self, name: str, megatron: MegatronConfig, path: str) -> PhasePlan:
        """The plan of a pass without update over all samples of a step."""
        prompts, n, dp = *self._step(), megatron.data_parallel_size
        self._divides_samples("data.train_batch_size", prompts, n, dp)
        micro = self._micro(path, _LOG_PROB_KEYS, _share(prompts * n, dp), self._longest(), _LONGEST)
        return PhasePlan(name, _layout(megatron), dp or 1, 1, 1, prompts, prompts * n, micro, False)

    def _step(self) -> tuple[int, int]:
        """Prompts per step, samples per prompt."""
        return value_at(self.config, "data.train_batch_size"), value_at(self.config, "actor_rollout_ref.rollout.n")

    def _longest(self) -> int:
        """Tokens of the longest possible sample."""
        return value_at(self.config, "data.max_prompt_length") + value_at(self.config, "data.max_response_length")

    def _micro(self, path: str, keys: _MicroKeys, share: int | None, longest: int, longest_name: str) -> MicroBatches:
        """Checks and returns how a rank's ``share`` of samples is cut; a share of None is not whole."""
        keys = _MicroKeys(*(f"{path}.{key}" for key in keys))
        dynamic, max_tokens, samples = (value_at(self.config, key) for key in keys)
        if dynamic:
            if samples is not None:
                self._note(keys.samples, f"has no effect while {keys.dynamic}=true; leave it null or set that to false")
            if max_tokens < longest:
                self._note(keys.max_tokens, f"must hold the longest sample, {longest_name} = {longest} tokens")
            return MicroBatches(max_tokens=max_tokens)
        if samples is None:
            self._note(keys.samples, f"must be set while {keys.dynamic}=false")
        elif share is not None and share % samples:
            fitting = [d for d in range(1, share + 1) if share % d == 0]
            near = sorted(sorted(fitting, key=lambda d: abs(d - samples))[:2])
            self._note(
                keys.samples,
                f"does not divide the {share} samples that a data-parallel rank computes at a time; "
                f"nearest that do: {' and '.join(map(str, near))}",
            )
        return MicroBatches(samples=samples)

    def _divides_samples(self, path: str, prompts: int, n: int, dp: int | None) -> None:
        if dp is None:
            return
        what = f"prompts x {n} samples each (actor_rollout_ref.rollout.n) = {prompts * n} samples"
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


_LONGEST = "data.max_prompt_length + data.max_response_length"


def _share(samples: int, dp: int | None) -> int | None:
    """Samples per data-parallel rank, or None where they do not divide."""
    return None if dp is None or samples % dp else samples // dp


def _ranks(dp: int) -> str:
    return f"{dp} data-parallel ranks"


def _layout(megatron: MegatronConfig) -> str:
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    return f"TP{tp} PP{pp} DP{megatron.data_parallel_size}"


_TITLES = {
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
        head = f"One training step: {plan.samples_per_step} samples"
    else:
        head = (
            f"One training step: {plan.prompts_per_step} prompts x {plan.samples_per_prompt} samples each "
            f"= {plan.samples_per_step} samples"
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
