"""An external agent for end-to-end runs that uses megarl through its HTTP endpoint only."""

import json
import os
import time
from pathlib import Path
from urllib.request import Request, urlopen


def chat(base_url, api_key, messages, **options):
    """Send a chat completion request; return the response body."""
    body = json.dumps({"model": "policy", "messages": messages, **options}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", body, headers), timeout=120) as response:
        return json.load(response)


def two_turns(task):
    """Lead two turns, and write the tokens and log-probs of every response to ``MEGARL_E2E_TURNS``.

    The first turn waits until the test's client has its response, for which the file ``MEGARL_E2E_ANSWERED`` is made.
    """
    answered, deadline = Path(os.environ["MEGARL_E2E_ANSWERED"]), time.monotonic() + 120
    while not answered.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    terms = task.facts["extra_info"]["terms"]
    if terms[0] % 5 == 0:
        raise ValueError("simulated agent failure")
    messages, turns = list(task.messages), []
    for turn in range(2):
        body = chat(task.base_url, task.api_key, messages, max_tokens=3, return_token_ids=True, logprobs=True)
        (choice,) = body["choices"]
        log_probs = [token["logprob"] for token in choice["logprobs"]["content"]]
        turns.append([body["prompt_token_ids"], choice["token_ids"], log_probs, body["weight_version"]])
        messages += [choice["message"], {"role": "user", "content": f"Really? {turn}"}]
    with Path(os.environ["MEGARL_E2E_TURNS"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(turns) + "\n")
    return {"score": len(messages[-2]["content"]), "requests": 2.0}
