"""The search agent loop: multi-turn retrieval with Search-R1's protocol (Jin et al. 2025, arXiv:2503.09516).

The policy writes its reasoning in ``<think>``, a query in ``<search>`` and the answer in ``<answer>``. Documents follow
in ``<information>``. Generation of a turn stops at ``</search>`` or ``</answer>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from megarl.agents.event_loop import in_tokenizer_thread
from megarl.agents.loop import AgentLoop, Transcript, encode_messages, register_agent_loop
from megarl.agents.retrieval_client import SEARCH_URL, Hit, RetrievalClient, RetrievalOptions
from megarl.agents.types import Conversation, Generate, Trajectory, TrajectoryEnd
from megarl.base.errors import ConfigError
from megarl.data.tokenizers import control_tokens, longest_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import GenerationJobConfig

STOP = ("</search>", "</answer>")
INVALID = (
    "\nThis turn had no action that could be carried out. To look something up, write a query between <search> and "
    "</search>. To finish, write the answer between <answer> and </answer>. Please go on.\n"
)
NO_HITS = "No document matches this query."

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_TAGS = re.compile(r"</?(?:think|search|information|answer)>")


class Action(NamedTuple):
    """Action of a turn.

    Attributes:
        kind: ``search``, ``answer``, or ``invalid`` for a turn without an action.
    """

    kind: Literal["search", "answer", "invalid"]
    text: str = ""


@register_agent_loop("search_agent")
class SearchLoop(AgentLoop):
    """Generates up to ``</search>`` or ``</answer>``, searches, and continues, all within one assistant message.

    After ``max_turns`` turns there is a last one, whose search is not run.

    Args:
        max_turns: number of turns that the environment answers.
        max_obs_length: maximum number of tokens per observation; a longer one is cut at its right end, and its closing
            tag is kept.
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
        self._tag_tokens = len(self._ids(information_turn("")))

    @classmethod
    def check(cls, config: GenerationJobConfig, **options: Any) -> None:
        """Check that the configuration names a retrieval server."""
        _url(config)

    @classmethod
    def create(cls, config: GenerationJobConfig, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Self:
        """Build the loop with a client of ``multi_turn.search.url``."""
        keys = config.actor_rollout_ref.rollout.multi_turn.search
        retrieval = RetrievalOptions(_url(config), keys.topk, keys.timeout_s, keys.retries)
        configured = {
            "max_turns": keys.max_turns,
            "max_obs_length": keys.max_obs_length,
            "template_kwargs": config.data.apply_chat_template_kwargs,
        }
        return cls(tokenizer, RetrievalClient(retrieval), **{**configured, **options})

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Generate turns until the policy answers or a limit is reached."""
        prompt_ids = conversation.prompt_ids or await encode_messages(
            self.tokenizer, conversation, template_kwargs=self.template_kwargs
        )
        transcript = Transcript(conversation, prompt_ids)
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
        return transcript.end(reason, _metrics(actions), {"answer": actions[-1].text if reason == "stop" else None})

    async def _observation(self, action: Action) -> list[int]:
        """Return the tokens of the environment's turn, tokenized separately."""
        if action.kind != "search":
            return await in_tokenizer_thread(partial(self._ids, INVALID))
        hits = await self.client.search(action.text)
        return await in_tokenizer_thread(partial(self._shown, hits))

    def _shown(self, hits: Sequence[Hit]) -> list[int]:
        """Encode documents, cut to the limit of an observation."""
        text = format_hits(hits)
        text = text[: (self.max_obs_length + 1) * longest_token(self.tokenizer)]  # to tokenize megabytes takes minutes
        ids = self._information(text)
        if len(ids) <= self.max_obs_length:
            return ids
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in encoded["offset_mapping"]]
        budget = min(max(self.max_obs_length - self._tag_tokens, 1), len(ends))
        ids = self._information(text[: ends[budget - 1]])
        while len(ids) > self.max_obs_length and budget > 1:  # a hidden control token counts once, and is spelled
            budget -= min(len(ids) - self.max_obs_length, budget - 1)
            ids = self._information(text[: ends[budget - 1]])
        return ids

    def _information(self, text: str) -> list[int]:
        return self._ids(information_turn(control_tokens(self.tokenizer).hide(text)))

    def _ids(self, text: str) -> list[int]:
        return control_tokens(self.tokenizer).encode(text)


def read_action(turn: str) -> Action:
    """Return the first action of a turn; an action without text is invalid."""
    match = _ACTION.search(turn)
    if match is None or not match[2].strip():
        return Action("invalid")
    return Action("search" if match[1] == "search" else "answer", match[2].strip())


def information_turn(text: str) -> str:
    """Wrap a text in ``<information>`` tags."""
    return f"\n\n<information>{text.strip()}</information>\n\n"


def format_hits(hits: Sequence[Hit]) -> str:
    """Format documents for the policy, without the protocol's tags, so that a document cannot contain an action.

    A space replaces a tag, so that its neighbours form no other one.
    """
    if not hits:
        return NO_HITS
    text = "\n".join(f"Doc {number}(Title: {hit.title}) {hit.text}" for number, hit in enumerate(hits, 1))
    return _TAGS.sub(" ", text)


def _metrics(actions: list[Action]) -> dict[str, float]:
    kinds = [action.kind for action in actions]
    return {
        "env/actions": float(len(kinds)),
        "env/valid_actions": float(len(kinds) - kinds.count("invalid")),
        "env/valid_searches": float(kinds.count("search")),
        "env/finished": float(kinds[-1:] == ["answer"]),
    }


def _url(config: GenerationJobConfig) -> str:
    url: str | None = config.actor_rollout_ref.rollout.multi_turn.search.url
    if url is None:
        text = f"{SEARCH_URL} is null; search_agent needs a server such as http://127.0.0.1:8000/retrieve"
        raise ConfigError(text, code="tool.no-retriever")
    return url
