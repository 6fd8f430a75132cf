"""One question, one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from megarl.rollout.agents.frames import encode_prompt
from megarl.rollout.agents.loop import AgentError, AgentLoop, Conversation, Generate, Trajectory
from megarl.rollout.agents.registry import register_agent_loop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import AnswersConfig


@register_agent_loop("single_turn_agent")
class SingleTurnLoop(AgentLoop):
    """Asks once and is done.

    Args:
        tokenizer: encodes prompts that come as messages only; not needed where all come encoded.
        template_kwargs: extra arguments for its chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})

    @classmethod
    def create(cls, config: AnswersConfig, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Self:
        """As the base says."""
        return cls(tokenizer, config.data.apply_chat_template_kwargs, **options)

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """One turn; built without a transcript, for there may be thousands of conversations in a second."""
        prompt_ids = conversation.prompt_ids or self._encoded(conversation)
        answer = await generate(prompt_ids, conversation.params, seed=conversation.seed, key=conversation.key)
        if answer.finish_reason == "abort":
            raise AgentError("the engine gave up the answer")
        return Trajectory(
            prompt_ids=prompt_ids,
            response_ids=answer.token_ids,
            response_mask=[1] * len(answer.token_ids),
            log_probs=answer.log_probs,
            finish_reason=answer.finish_reason,
            num_turns=2,
            weight_version=answer.weight_version,
            weight_versions=answer.weight_versions,
        )

    def _encoded(self, conversation: Conversation) -> list[int]:
        if self.tokenizer is None:
            raise AgentError("single_turn_agent got a prompt as messages and has no tokenizer to encode it with")
        return encode_prompt(self.tokenizer, conversation.messages, template_kwargs=self.template_kwargs)
