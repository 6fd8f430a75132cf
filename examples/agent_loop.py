"""An agent loop of one's own: the policy may think again, and what counts is its second answer.

python -m megarl.train --config-name quickstart_grpo data.max_response_length=24 \
  actor_rollout_ref.rollout.agent.default_agent_loop=examples/agent_loop.py:AskTwice

With options it is an entry of a file of loops, as ``examples/agent_loops.yaml``.
"""

from __future__ import annotations

from typing import Any, Self

from megarl.rollout.agents import AgentLoop, Conversation, Generate, Trajectory, Transcript
from megarl.rollout.agents.frames import turn_frame


class AskTwice(AgentLoop):
    """Asks once more, in the same words for everyone.

    Args:
        tokenizer: of the policy.
        question: what is said after the first answer.
    """

    def __init__(self, tokenizer: Any, question: str = "What is it?") -> None:
        self.tokenizer, self.question = tokenizer, question

    @classmethod
    def create(cls, config: Any, tokenizer: Any, **options: Any) -> Self:
        """Made once per run; ``config`` is the run's, complete, and ``options`` are those of the entry."""
        return cls(tokenizer, **options)

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Two turns; what is between them is context, and not learned."""
        transcript = Transcript(conversation)
        turn = await transcript.generate(generate)
        said = turn_frame(self.tokenizer, [{"role": "user", "content": self.question}], turn.token_ids[-1])
        if not transcript.observe(said):  # no room is left for an answer
            return transcript.end("length", {"asked": 1.0})
        turn = await transcript.generate(generate)
        return transcript.end(turn.finish_reason, {"asked": 2.0})
