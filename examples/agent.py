"""An agent of one's own, with nothing but Python's library: it has a problem answered, twice where the first is wrong.

python -m megarl.train --config-name quickstart_grpo data.max_response_length=64 \
  actor_rollout_ref.rollout.agent.external_agent=examples/agent.py:check_twice reward_model.name=agent_score

It knows megarl by the address and the token that it is given: any framework with OpenAI's interface does as well.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

from megarl.rollout.agents import AgentTask


def chat(task: AgentTask, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The policy's next message.

    Raises:
        urllib.error.HTTPError: the conversation's tokens are used up, for one; then it ends here, and counts.
    """
    body = json.dumps({"model": task.model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{task.base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]


def check_twice(task: AgentTask) -> dict[str, float]:
    """Asks, and where the answer is wrong asks once more; a right one is worth half then.

    Returns:
        ``score``, and ``first``: whether the first answer was right. The latter is reported as a metric.
    """
    right = str(task.facts["reward_model"]["ground_truth"])
    messages = [dict(message) for message in task.messages]
    first = chat(task, messages)
    if first["content"].strip() == right:
        return {"score": 1.0, "first": 1.0}
    messages += [first, {"role": "user", "content": messages[-1]["content"]}]
    return {"score": 0.5 * (chat(task, messages)["content"].strip() == right), "first": 0.0}
