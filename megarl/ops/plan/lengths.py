"""Mean lengths of prompts and responses, for which FLOPs and costs are computed."""

from __future__ import annotations

from typing import NamedTuple

from megarl.base.errors import ConfigError
from megarl.config import SupervisedConfig, TrainConfig


class Lengths(NamedTuple):
    """Tokens of a prompt and of a response; a supervised job has sequences of ``response`` tokens, without prompts."""

    prompt: float  # mean tokens of a prompt
    response: float  # mean tokens of a response
    longest: float  # tokens of the longest response of a step
    origin: str  # where the numbers come from, in words

    def describe(self) -> str:
        """Describe the lengths in one line."""
        if not self.prompt:
            return f"sequences of {self.response:,.0f} tokens ({self.origin})"
        return f"prompts of {self.prompt:,.0f} tokens, responses of {self.response:,.0f} ({self.origin})"


def lengths_of(config: TrainConfig | SupervisedConfig, text: str | None = None) -> Lengths:
    """Return mean lengths, at most those that the configuration allows.

    Args:
        text: ``PROMPT,RESPONSE``, or ``LENGTH`` for a supervised job; None = the longest allowed.

    Raises:
        ConfigError: the text is not of this form, or a length is not positive.
    """
    if isinstance(config, SupervisedConfig):
        limits = [config.data.max_length]
    else:
        limits = [config.data.max_prompt_length, config.data.max_response_length]
    means, origin = [float(limit) for limit in limits], "the longest allowed; change with --lengths"
    if text is not None:
        try:
            means, origin = [float(part) for part in text.split(",")], "--lengths"
        except ValueError:
            means = []
        if len(means) != len(limits) or not all(mean >= 1 for mean in means):
            form = "one number" if len(limits) == 1 else "two numbers, mean tokens of prompts and responses,"
            raise ConfigError(f"--lengths={text}: expected {form} of at least 1", code="plan.lengths")
        means = [min(mean, float(limit)) for mean, limit in zip(means, limits, strict=True)]
    return Lengths(means[0] if len(means) > 1 else 0.0, means[-1], float(limits[-1]), origin)
