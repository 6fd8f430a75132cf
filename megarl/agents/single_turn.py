"""The single-turn agent loop: one prompt, one response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from megarl.agents.loop import AgentLoop, encode_messages, register_agent_loop
from megarl.agents.types import AgentError, Conversation, Generate, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import GenerationJobConfig


@register_agent_loop("single_turn_agent")
class SingleTurnLoop(AgentLoop):
    """Generates one response per prompt.

    Args:
        tokenizer: tokenizer for prompts given as messages only; None if all prompts are encoded.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})

    @classmethod
    def create(cls, config: GenerationJobConfig, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Self:
        """Build the loop with the configured template arguments."""
        return cls(tokenizer, config.data.apply_chat_template_kwargs, **options)

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Generate one turn; without a transcript, for speed at thousands of conversations per second."""
        prompt_ids = conversation.prompt_ids or await self._encode(conversation)
        completion = await generate(prompt_ids, conversation.params, seed=conversation.seed, key=conversation.key)
        if completion.finish_reason == "abort":
            raise AgentError("the engine aborted the response", code="agent.engine-aborted")
        return Trajectory(
            prompt_ids=prompt_ids,
            response_ids=completion.token_ids,
            response_mask=[1] * len(completion.token_ids),
            log_probs=completion.log_probs,
            finish_reason=completion.finish_reason,
            num_turns=2,
            weight_version=completion.weight_version,
            weight_versions=completion.weight_versions,
        )

    async def _encode(self, conversation: Conversation) -> list[int]:
        if self.tokenizer is None:
            raise AgentError("single_turn_agent has no tokenizer to encode messages with", code="agent.no-tokenizer")
        return await encode_messages(self.tokenizer, conversation, template_kwargs=self.template_kwargs)
