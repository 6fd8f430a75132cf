"""The endpoint as a configuration asks for it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.agents import EndpointConfig, MultiTurnConfig
from megarl.models import read_model_config
from megarl.rollout.endpoint.endpoint import Address, Endpoint
from megarl.rollout.endpoint.outside import OutsideLimits
from megarl.rollout.endpoint.translation import ChatFormat
from megarl.rollout.interface import SamplingParams
from megarl.rollout.settings import takes_stop_strings
from megarl.rollout.tools import find_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import AnswersConfig


def build_endpoint(config: AnswersConfig, tokenizer: PreTrainedTokenizerBase) -> Endpoint | None:
    """The run's endpoint, not yet listening; None where it serves none.

    Args:
        config: complete.
        tokenizer: of the policy.

    Raises:
        ModelError: the model's folder has no usable configuration.
        ConfigError: ``multi_turn.format`` is unknown, or the token that the environment sets is unusable.
    """
    policy, data = config.actor_rollout_ref, config.data
    rollout = policy.rollout
    if not rollout.serves_endpoint:
        return None
    endpoint: EndpointConfig = rollout.endpoint
    multi_turn: MultiTurnConfig = rollout.multi_turn
    chat = ChatFormat(
        copy.deepcopy(tokenizer),  # requests come at any time, and no two threads may use one
        find_parser(multi_turn.format),
        data.apply_chat_template_kwargs,
        stop_strings=takes_stop_strings(rollout, policy.model.path),
    )
    sampling = SamplingParams(data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k)
    longest = read_model_config(policy.model.path).max_position_embeddings
    tokens = min(data.max_prompt_length + data.max_response_length, longest)
    limits = OutsideLimits(sampling, tokens, endpoint.wait_s)
    file = Path(endpoint.access_file) if endpoint.access_file else None
    return Endpoint(chat, limits, Address(endpoint.host, endpoint.port, file))
