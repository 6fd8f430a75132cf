"""Arguments of reward functions, built from the columns and token ids of samples; imports no torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from megarl.base.errors import RewardError
from megarl.rewards.calling import RewardTask
from megarl.rewards.rules.agent_score import AGENT_RESULT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds: TypeAlias = Sequence[int] | np.ndarray


class TaskBuilder:
    """Builds the arguments of the reward functions from samples."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, wants_prompt: bool) -> None:
        self.tokenizer = tokenizer
        self.wants_prompt = wants_prompt

    def build(self, row: Hashable, columns: Mapping[str, Any], prompt: TokenIds, response: TokenIds) -> RewardTask:
        """Build the task of a sample from its columns and unpadded token ids.

        Raises:
            RewardError: it has no ground truth; ``row`` names it.
        """
        model = columns["reward_model"]
        if not hasattr(model, "get") or model.get("ground_truth") is None:
            text = f"column 'reward_model', row {row} is {model!r:.200}; it must have a 'ground_truth'"
            raise RewardError(text, code="reward.no-ground-truth")
        result = columns.get(AGENT_RESULT)
        return RewardTask(
            data_source=columns["data_source"],
            solution_str=self.text(response),
            ground_truth=model["ground_truth"],
            extra_info={**(columns.get("extra_info") or {}), **({} if result is None else {AGENT_RESULT: result})},
            prompt_str=self.text(prompt) if self.wants_prompt else None,
        )

    def text(self, ids: TokenIds) -> str:
        """Decode token ids."""
        return str(self.tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True))
