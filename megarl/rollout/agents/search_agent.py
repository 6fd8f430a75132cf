"""A policy that searches, by Search-R1's protocol (Jin et al. 2025, arXiv:2503.09516)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from megarl.errors import ConfigError
from megarl.retrieval import RetrievalClient, RetrievalOptions
from megarl.rollout.agents.frames import encode_prompt, plain_text
from megarl.rollout.agents.loop import AgentLoop, Conversation, Generate, Trajectory, TrajectoryEnd, Transcript
from megarl.rollout.agents.registry import register_agent_loop
from megarl.rollout.agents.search_protocol import INVALID, STOP, Action, information, listed, read_action

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import AnswersConfig


@register_agent_loop("search_agent")
class SearchLoop(AgentLoop):
    """Generates up to ``</search>`` or ``</answer>``, searches, and goes on, all in one assistant's message.

    After ``max_turns`` turns there is a last one, in which a search is no longer carried out.

    Args:
        tokenizer: of the policy.
        client: of the retrieval server.
        max_turns: turns after which the environment answers.
        max_obs_length: most tokens of one such answer; a longer one is cut at its right, its closing tag kept.
        template_kwargs: extra arguments for the chat template, where prompts come as messages only.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        client: RetrievalClient,
        max_turns: int = 2,
        max_obs_length: int = 500,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.client = client
        self.max_turns = max_turns
        self.max_obs_length = max_obs_length
        self.template_kwargs = dict(template_kwargs or {})
        self._around = len(self._ids(information("")))

    @classmethod
    def check(cls, config: AnswersConfig, **options: Any) -> None:
        """As the base says."""
        _url(config)

    @classmethod
    def create(cls, config: AnswersConfig, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Self:
        """As the base says.

        Raises:
            ConfigError: no retrieval server is named.
        """
        asked = RetrievalOptions(
            _url(config), config.retriever.topk, config.retriever.timeout_s, config.retriever.retries
        )
        given = {
            "max_turns": config.max_turns,
            "max_obs_length": config.data.max_obs_length,
            "template_kwargs": config.data.apply_chat_template_kwargs,
        }
        return cls(tokenizer, RetrievalClient(asked), **{**given, **options})

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Turn by turn, until the policy answers or a limit is met."""
        encoded = conversation.prompt_ids or encode_prompt(
            self.tokenizer, conversation.messages, template_kwargs=self.template_kwargs
        )
        transcript = Transcript(conversation, encoded)
        params = replace(conversation.params, stop=(*conversation.params.stop, *STOP))
        actions: list[Action] = []
        reason: TrajectoryEnd = "turns"
        for turn in range(self.max_turns + 1):
            completion = await transcript.generate(generate, params)
            actions.append(read_action(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)))
            if actions[-1].kind == "answer":
                reason = "stop"
                break
            if turn == self.max_turns:
                break
            if not transcript.observe(await self._observation(actions[-1])):
                reason = "length"
                break
        return transcript.end(reason, _metrics(actions), {"answer": _answer(actions)})

    async def _observation(self, action: Action) -> list[int]:
        """The environment's turn; tokenized by itself."""
        if action.kind != "search":
            return self._ids(INVALID)
        found = plain_text(self.tokenizer, listed(await self.client.search(action.text)))
        ids = self._ids(information(found))
        if len(ids) <= self.max_obs_length:
            return ids
        budget = max(self.max_obs_length - self._around, 1)
        encoded = self.tokenizer(found, add_special_tokens=False, return_offsets_mapping=True)
        return self._ids(information(found[: encoded["offset_mapping"][budget - 1][1]]))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _answer(actions: list[Action]) -> str | None:
    return actions[-1].text if actions and actions[-1].kind == "answer" else None


def _metrics(actions: list[Action]) -> dict[str, float]:
    kinds = [action.kind for action in actions]
    return {
        "env/actions": float(len(kinds)),
        "env/valid_actions": float(len(kinds) - kinds.count("invalid")),
        "env/valid_searches": float(kinds.count("search")),
        "env/finished": float(kinds[-1:] == ["answer"]),
    }


def _url(config: AnswersConfig) -> str:
    if config.retriever.url is None:
        raise ConfigError("retriever.url is null; search_agent needs a server such as http://127.0.0.1:8000/retrieve")
    return config.retriever.url
