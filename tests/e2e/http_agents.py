"""An agent for end-to-end runs, as somebody writes it who knows megarl by its HTTP interface alone."""

import json
import os
from urllib.request import Request, urlopen


def ask(base_url, api_key, messages, **options):
    body = json.dumps({"model": "policy", "messages": messages, **options}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", body, headers), timeout=120) as answer:
        return json.load(answer)


def asks_twice(task):
    """Asks, objects, and asks again; notes the tokens that it was told, for the test to compare."""
    terms = task.facts["extra_info"]["terms"]
    if terms[0] % 5 == 0:
        raise ValueError("this one is lost")
    messages, seen = list(task.messages), []
    for turn in range(2):
        body = ask(task.base_url, task.api_key, messages, max_tokens=3, return_token_ids=True, logprobs=True)
        (choice,) = body["choices"]
        written = [token["logprob"] for token in choice["logprobs"]["content"]]
        seen.append([body["prompt_token_ids"], choice["token_ids"], written, body["weight_version"]])
        messages += [choice["message"], {"role": "user", "content": f"Really? {turn}"}]
    with open(os.environ["MEGARL_E2E_SEEN"], "a") as file:
        file.write(json.dumps(seen) + "\n")
    return {"score": len(messages[-2]["content"]), "asked": 2.0}
