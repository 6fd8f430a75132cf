"""A custom agent with Python's standard library only: it asks the policy again if the first answer is wrong.

megarl train --config-name quickstart_grpo data.max_response_length=64 \
  actor_rollout_ref.rollout.agent.external_agent=examples/agent.py:check_twice reward.name=agent_score

The agent only needs the base URL and the token of the chat endpoint, so any framework with an OpenAI client works.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

from megarl.agents import AgentTask


def chat(task: AgentTask, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the policy's next message.

    Raises:
        urllib.error.HTTPError: for example if no tokens are left; the conversation then ends normally.
    """
    body = json.dumps({"model": task.model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{task.base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]


def check_twice(task: AgentTask) -> dict[str, float]:
    """Lead one conversation: a right answer scores 1, a right second answer 0.5.

    Returns:
        ``score``, and ``first``: whether the first answer is right, reported as a metric.
    """
    right = str(task.facts["reward_model"]["ground_truth"])
    messages = [dict(message) for message in task.messages]
    first = chat(task, messages)
    if first["content"].strip() == right:
        return {"score": 1.0, "first": 1.0}
    messages += [first, {"role": "user", "content": messages[-1]["content"]}]
    return {"score": 0.5 * (chat(task, messages)["content"].strip() == right), "first": 0.0}
