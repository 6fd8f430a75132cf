"""How long prompts and answers are: a distribution that is given, the files of an earlier run, or the longest."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.problems import nearest_keys
from megarl.errors import ConfigError

Ints = npt.NDArray[np.int64]
_FIELDS = ("mean", "max", "sigma", "prompt_mean", "prompt_max", "prompt_sigma")
_FORM = "Write mean=600,max=4096,sigma=0.8 for the answers (all but mean may be left out) and likewise \
prompt_mean=..., prompt_max=..., prompt_sigma=..., or name a file of an earlier run: <step>.npz, or metrics.jsonl"


@dataclass(frozen=True)
class Quantiles:
    """A distribution by equally likely values, ascending, in tokens."""

    values: tuple[int, ...]

    @classmethod
    def constant(cls, length: int) -> Quantiles:
        """All of one length."""
        return cls((length,))

    @classmethod
    def log_normal(cls, mean: float, sigma: float, longest: int, count: int = 256) -> Quantiles:
        """A log-normal distribution cut off at the longest, of which the mean is after that.

        Args:
            mean: in tokens; at most ``longest``.
            sigma: standard deviation of the logarithm; 0 = all of the same length.
            longest: in tokens.
            count: how many values stand for it.
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
        """Of what was measured."""
        at = (np.arange(count) + 0.5) / count
        return cls(tuple(np.rint(np.quantile(np.asarray(lengths), at)).astype(int).tolist()))

    @property
    def mean(self) -> float:
        """In tokens."""
        return sum(self.values) / len(self.values)

    @property
    def longest(self) -> int:
        """In tokens."""
        return self.values[-1]

    def describe(self) -> str:
        """In a few words."""
        if self.values[0] == self.longest:
            return f"{self.longest:,} tokens each"
        return f"{self.mean:,.0f} tokens on average, {self.longest:,} at most"

    def sample(self, count: int, seed: int) -> Ints:
        """So many lengths, as evenly spread over the distribution as they can be, in an order that a seed tells."""
        at = ((np.arange(count) + 0.5) / count * len(self.values)).astype(int)
        return np.random.default_rng(seed).permutation(np.asarray(self.values, dtype=np.int64)[at])


@dataclass(frozen=True)
class Lengths:
    """Of prompts and of answers, which are independent of each other; and where they come from, in words."""

    prompts: Quantiles
    responses: Quantiles
    origin: str

    def rows(self, count: int) -> tuple[Ints, Ints]:
        """Prompt and response lengths of so many samples."""
        return self.prompts.sample(count, 0), self.responses.sample(count, 1)

    def describe(self) -> str:
        """In one line. Where no row has a prompt, as in supervised training, answers are whole sequences."""
        pair = [("prompts", self.prompts), ("answers", self.responses)]
        if not self.prompts.longest:
            pair = [("sequences", self.responses)]
        parts = [f"{name} of {q.describe()}" for name, q in pair]
        return f"{', '.join(parts)} ({self.origin})"


def longest_lengths(prompt: int, response: int) -> Lengths:
    """Every sample as long as the configuration allows."""
    origin = "the longest allowed; say yours by --lengths"
    return Lengths(Quantiles.constant(prompt), Quantiles.constant(response), origin)


def read_lengths(text: str, prompt_max: int, response_max: int) -> Lengths:
    """Lengths by ``mean=600,max=4096,sigma=0.8`` or by a file of an earlier run; longer ones are cut.

    Args:
        text: what the command line has.
        prompt_max: longest prompt of the configuration; of prompts nothing else is known unless the text says it.
        response_max: longest response.

    Raises:
        ConfigError: the text or the file cannot be read as one of these.
    """
    path = Path(text)
    if path.suffix == ".npz" and path.is_file():
        return _of_dump(path, prompt_max, response_max)
    if path.suffix == ".jsonl" and path.is_file():
        return _of_metrics(path, prompt_max, response_max)
    if "=" not in text:
        what = "it is neither .npz nor .jsonl" if path.exists() else "there is no such file"
        raise ConfigError(f"--lengths={text}: {what}. {_FORM}")
    given = _numbers(text)
    if "mean" not in given and "prompt_mean" not in given:
        raise ConfigError(f"--lengths={text}: no mean. {_FORM}")
    prompts = _one(given, "prompt_", prompt_max, text)
    return Lengths(prompts, _one(given, "", response_max, text), f"--lengths {text}")


def lengths_of(config: TrainConfig | SupervisedConfig, text: str | None = None) -> Lengths:
    """Lengths as asked for, within what the configuration allows; without a text, the longest.

    Raises:
        ConfigError: the text cannot be read.
    """
    if isinstance(config, SupervisedConfig):
        prompt, response = 0, config.data.max_length
    else:
        prompt, response = config.data.max_prompt_length, config.data.max_response_length
    return longest_lengths(prompt, response) if text is None else read_lengths(text, prompt, response)


def _one(given: dict[str, float], prefix: str, limit: int, text: str) -> Quantiles:
    longest = int(given.get(f"{prefix}max", limit))
    mean, sigma = given.get(f"{prefix}mean", float(longest)), given.get(f"{prefix}sigma", 0.8)
    if not 1 <= longest <= limit:
        raise ConfigError(f"--lengths={text}: {prefix}max={longest} must be between 1 and the configuration's {limit}")
    if not 1 <= mean <= longest:
        raise ConfigError(f"--lengths={text}: {prefix}mean={mean:g} must be between 1 and the longest, {longest}")
    if sigma < 0:
        raise ConfigError(f"--lengths={text}: {prefix}sigma={sigma:g} must be at least 0")
    return Quantiles.constant(longest) if mean == longest else Quantiles.log_normal(mean, sigma, longest)


def _numbers(text: str) -> dict[str, float]:
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in _FIELDS:
            near = nearest_keys(name, _FIELDS)
            guess = f"; did you mean {near[0]}?" if near else "."
            raise ConfigError(f"--lengths={text}: unknown field '{name}'{guess} There are {', '.join(_FIELDS)}")
        try:
            given[name] = float(value)
        except ValueError:
            given[name] = math.nan
        if not math.isfinite(given[name]):
            raise ConfigError(f"--lengths={text}: {name}={value} must be a number")
    return given


def _of_dump(path: Path, prompt_max: int, response_max: int) -> Lengths:
    try:
        with np.load(path, allow_pickle=False) as file:
            prompts, responses = file["prompt_lengths"], file["response_lengths"]
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise ConfigError(f"--lengths={path} is no <step>.npz of trainer.rollout_data_dir: {error}") from error
    cut = (Quantiles.of(np.minimum(prompts, prompt_max)), Quantiles.of(np.minimum(responses, response_max)))
    return Lengths(*cut, origin=f"{len(responses)} answers of {path}")


def _of_metrics(path: Path, prompt_max: int, response_max: int) -> Lengths:
    """The last step's means; their shape is taken as log-normal."""
    last: dict[str, Any] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            last = row if "response_length/mean" in row else last
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"--lengths={path} is no metrics.jsonl: {error}") from error
    if not last:
        raise ConfigError(f"--lengths={path}: no line has response_length/mean")

    def one(name: str, limit: int) -> Quantiles:
        mean, longest = float(last[f"{name}/mean"]), min(limit, int(last.get(f"{name}/max", limit)))
        return Quantiles.log_normal(min(mean, longest), 0.8, longest)

    prompts = one("prompt_length", prompt_max) if "prompt_length/mean" in last else Quantiles.constant(prompt_max)
    return Lengths(prompts, one("response_length", response_max), f"the last step of {path}")
