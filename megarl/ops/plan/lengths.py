"""Prompt and response lengths: a given distribution, the files of an earlier run, or the maximum lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from megarl.base.errors import ConfigError
from megarl.base.json_text import parse_json
from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.problems import nearest_keys

Ints = npt.NDArray[np.int64]
_FIELDS = ("mean", "max", "sigma", "prompt_mean", "prompt_max", "prompt_sigma")
_FORM = "Write mean=600,max=4096,sigma=0.8 for the responses (only mean is required), and likewise \
prompt_mean=..., prompt_max=..., prompt_sigma=..., or name a file of an earlier run: <step>.npz, or metrics.jsonl"


@dataclass(frozen=True)
class Quantiles:
    """A length distribution as equally likely values, ascending, in tokens."""

    values: tuple[int, ...]

    @classmethod
    def constant(cls, length: int) -> Quantiles:
        """Return the distribution of a single length."""
        return cls((length,))

    @classmethod
    def log_normal(cls, mean: float, sigma: float, longest: int, count: int = 256) -> Quantiles:
        """Return a log-normal distribution, cut at ``longest`` and scaled so that the cut distribution has the mean.

        Args:
            mean: in tokens; at most ``longest``.
            sigma: standard deviation of the logarithm; 0 = all lengths equal.
            longest: maximum, in tokens.
            count: number of quantiles.
        """
        normal = NormalDist()
        shape = np.exp([sigma * normal.inv_cdf((i + 0.5) / count) for i in range(count)])
        low, high = 0.0, float(longest) / shape[0]
        for _ in range(60):  # the mean grows with the scale
            middle = (low + high) / 2
            low, high = (middle, high) if np.minimum(middle * shape, longest).mean() < mean else (low, middle)
        return cls(tuple(np.maximum(np.minimum(np.rint(high * shape), longest), 1).astype(int).tolist()))

    @classmethod
    def of(cls, lengths: Sequence[int] | Ints, count: int = 256) -> Quantiles:
        """Return the quantiles of measured lengths."""
        at = (np.arange(count) + 0.5) / count
        return cls(tuple(np.rint(np.quantile(np.asarray(lengths), at)).astype(int).tolist()))

    @property
    def mean(self) -> float:
        """Mean length in tokens."""
        return sum(self.values) / len(self.values)

    @property
    def longest(self) -> int:
        """Maximum length in tokens."""
        return self.values[-1]

    def describe(self) -> str:
        """Describe the distribution in a few words."""
        if self.values[0] == self.longest:
            return f"{self.longest:,} tokens each"
        return f"{self.mean:,.0f} tokens on average, {self.longest:,} at most"

    def sample(self, count: int, seed: int) -> Ints:
        """Return ``count`` lengths, spread evenly over the distribution and shuffled by ``seed``."""
        at = ((np.arange(count) + 0.5) / count * len(self.values)).astype(int)
        return np.random.default_rng(seed).permutation(np.asarray(self.values, dtype=np.int64)[at])


@dataclass(frozen=True)
class Lengths:
    """Independent length distributions of prompts and responses, and their origin in words."""

    prompts: Quantiles
    responses: Quantiles
    origin: str

    def rows(self, count: int) -> tuple[Ints, Ints]:
        """Return prompt and response lengths of ``count`` samples."""
        return self.prompts.sample(count, 0), self.responses.sample(count, 1)

    def describe(self) -> str:
        """Describe both distributions in one line; supervised jobs have no prompts."""
        pair = [("prompts", self.prompts), ("answers", self.responses)]
        if not self.prompts.longest:
            pair = [("sequences", self.responses)]
        parts = [f"{name} of {q.describe()}" for name, q in pair]
        return f"{', '.join(parts)} ({self.origin})"


def longest_lengths(prompt: int, response: int) -> Lengths:
    """Return lengths at the maximum of the configuration."""
    origin = "the longest allowed; change with --lengths"
    return Lengths(Quantiles.constant(prompt), Quantiles.constant(response), origin)


def read_lengths(text: str, prompt_max: int, response_max: int) -> Lengths:
    """Read lengths from ``mean=600,max=4096,sigma=0.8`` or from a file of an earlier run; longer lengths are cut.

    Args:
        text: value of ``--lengths``.
        prompt_max: maximum prompt length of the configuration, also the default.
        response_max: maximum response length of the configuration.

    Raises:
        ConfigError: the text or the file cannot be read.
    """
    path = Path(text)
    if path.suffix == ".npz" and path.is_file():
        return _of_dump(path, prompt_max, response_max)
    if path.suffix == ".jsonl" and path.is_file():
        return _of_metrics(path, prompt_max, response_max)
    if "=" not in text:
        reason = "it is neither .npz nor .jsonl" if path.exists() else "no such file"
        raise ConfigError(f"--lengths={text}: {reason}. {_FORM}", code="plan.lengths-file")
    fields = _numbers(text)
    if "mean" not in fields and "prompt_mean" not in fields:
        raise ConfigError(f"--lengths={text}: no mean. {_FORM}", code="plan.lengths-mean")
    prompts = _distribution(fields, "prompt_", prompt_max, text)
    return Lengths(prompts, _distribution(fields, "", response_max, text), f"--lengths {text}")


def lengths_of(config: TrainConfig | SupervisedConfig, text: str | None = None) -> Lengths:
    """Return the lengths of ``text`` within the limits of the configuration; without text, the maximum lengths.

    Raises:
        ConfigError: the text cannot be read.
    """
    if isinstance(config, SupervisedConfig):
        prompt, response = 0, config.data.max_length
    else:
        prompt, response = config.data.max_prompt_length, config.data.max_response_length
    return longest_lengths(prompt, response) if text is None else read_lengths(text, prompt, response)


def _distribution(fields: dict[str, float], prefix: str, limit: int, text: str) -> Quantiles:
    longest = int(fields.get(f"{prefix}max", limit))
    mean, sigma = fields.get(f"{prefix}mean", float(longest)), fields.get(f"{prefix}sigma", 0.8)
    if not 1 <= longest <= limit:
        raise ConfigError(
            f"--lengths={text}: {prefix}max={longest} must be between 1 and the configuration's {limit}",
            code="plan.lengths-range",
        )
    if not 1 <= mean <= longest:
        raise ConfigError(
            f"--lengths={text}: {prefix}mean={mean:g} must be between 1 and the longest, {longest}",
            code="plan.lengths-range",
        )
    if sigma < 0:
        raise ConfigError(f"--lengths={text}: {prefix}sigma={sigma:g} must be at least 0", code="plan.lengths-range")
    return Quantiles.constant(longest) if mean == longest else Quantiles.log_normal(mean, sigma, longest)


def _numbers(text: str) -> dict[str, float]:
    fields: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in _FIELDS:
            near = nearest_keys(name, _FIELDS)
            guess = f"; did you mean {near[0]}?" if near else "."
            raise ConfigError(
                f"--lengths={text}: unknown field '{name}'{guess} Known: {', '.join(_FIELDS)}",
                code="plan.lengths-field",
            )
        try:
            fields[name] = float(value)
        except ValueError:
            fields[name] = math.nan
        if not math.isfinite(fields[name]):
            raise ConfigError(f"--lengths={text}: {name}={value} must be a number", code="plan.lengths-number")
    return fields


def _of_dump(path: Path, prompt_max: int, response_max: int) -> Lengths:
    try:
        with np.load(path, allow_pickle=False) as file:
            prompts, responses = file["prompt_lengths"], file["response_lengths"]
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise ConfigError(
            f"--lengths={path} is no <step>.npz of trainer.rollout_data_dir: {error}", code="plan.lengths-dump"
        ) from error
    cut = (Quantiles.of(np.minimum(prompts, prompt_max)), Quantiles.of(np.minimum(responses, response_max)))
    return Lengths(*cut, origin=f"{len(responses)} answers of {path}")


def _of_metrics(path: Path, prompt_max: int, response_max: int) -> Lengths:
    """Return the mean lengths of the last step, as log-normal distributions."""
    last: dict[str, Any] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = parse_json(line)
            last = row if "response_length/mean" in row else last
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"--lengths={path} is no metrics.jsonl: {error}", code="plan.lengths-metrics") from error
    if not last:
        raise ConfigError(f"--lengths={path}: no line has response_length/mean", code="plan.lengths-metrics")

    def distribution(name: str, limit: int) -> Quantiles:
        mean, longest = float(last[f"{name}/mean"]), min(limit, int(last.get(f"{name}/max", limit)))
        return Quantiles.log_normal(min(mean, longest), 0.8, longest)

    prompts = (
        distribution("prompt_length", prompt_max) if "prompt_length/mean" in last else Quantiles.constant(prompt_max)
    )
    return Lengths(prompts, distribution("response_length", response_max), f"the last step of {path}")
