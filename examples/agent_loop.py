"""A custom agent loop: the policy answers twice, and the second answer counts.

megarl train --config-name quickstart_grpo data.max_response_length=24 \
  actor_rollout_ref.rollout.agent.default_agent_loop=examples/agent_loop.py:AskTwice

To set options, add an entry to a loop file such as ``examples/agent_loops.yaml``.
"""

from __future__ import annotations

from typing import Any, Self

from megarl.agents import AgentLoop, Conversation, Generate, Trajectory, Transcript


class AskTwice(AgentLoop):
    """Asks a second question after the first answer.

    Args:
        tokenizer: tokenizer of the policy.
        question: user message after the first answer.
    """

    def __init__(self, tokenizer: Any, question: str = "What is it?") -> None:
        self.tokenizer, self.question = tokenizer, question

    @classmethod
    def create(cls, config: Any, tokenizer: Any, **options: Any) -> Self:
        """Build the loop once per run, from the complete configuration and the options of the entry."""
        return cls(tokenizer, **options)

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Generate two turns; the question between them is context and not trained on."""
        transcript = Transcript(conversation)
        await transcript.generate(generate)
        question = {"role": "user", "content": self.question}
        if not await transcript.observe_messages(self.tokenizer, [question]):  # no room for a second answer
            return transcript.end("length", {"turns": 1.0})
        turn = await transcript.generate(generate)
        return transcript.end(turn.finish_reason, {"turns": 2.0})
