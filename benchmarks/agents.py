"""Overhead of agent loops without the engine: conversations and turns per second with a null engine.

The null engine answers at once, so all time is spent in the runner and the loops: asyncio, tokenization, parsing, chat
template. ``search_agent`` calls a real retrieval server in a separate process. ``external_agent`` is a function with a
plain HTTP client, in one thread per conversation.

    python benchmarks/agents.py
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/agents"), str(ROOT / "tools")]

from agent_cases import ids_of, merging_tokenizer  # noqa: E402
from retrieval_server import BM25Index, Document, RetrievalServer  # noqa: E402

from megarl.agents import AgentLoop, AgentTask, Conversation, ConversationLimits, run_all  # noqa: E402
from megarl.agents.endpoint import ChatFormat, Endpoint, EndpointAddress, ExternalRequestLimits  # noqa: E402
from megarl.agents.external_agent import ExternalAgent  # noqa: E402
from megarl.agents.retrieval_client import RetrievalClient, RetrievalOptions  # noqa: E402
from megarl.agents.search_agent import SearchLoop  # noqa: E402
from megarl.agents.single_turn import SingleTurnLoop  # noqa: E402
from megarl.agents.tool_agent import ToolLoop  # noqa: E402
from megarl.agents.tools import Tool, ToolEntry, find_parser  # noqa: E402
from megarl.rollout import Completion, SamplingParams  # noqa: E402

CONCURRENT, TURNS, ROUNDS = 256, 4, 3


class Look(Tool):
    """A tool that answers at once."""

    schema: ClassVar = {"function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}

    async def call(self, arguments, conversation):
        """Return a short text."""
        return "There are 7 keys in the drawer."


class NullEngine:
    """Returns the same response in every turn, except in the last."""

    def __init__(self, turn: list[int], last: list[int]) -> None:
        self.answers = {True: turn, False: last}
        self.turns: dict[str, int] = {}

    async def __call__(self, prompt_ids, params, *, seed, key):
        """Return a completion without waiting."""
        turn = self.turns[key] = self.turns.get(key, 0) + 1
        ids = self.answers[turn < TURNS]
        await asyncio.sleep(0)
        return Completion("", ids, [0.0] * len(ids), "stop", 0)


def serve(pipe: Connection) -> None:
    """Serve retrieval over a few thousand documents, and send the server's address."""
    documents = [Document(str(n), f"Drawer {n}\nThe drawer {n} of the desk holds {n % 97} keys") for n in range(5000)]
    server = RetrievalServer(BM25Index(documents), port=0)
    pipe.send(server.url)
    server.serve_forever()


def look_over_http(task: AgentTask) -> None:
    """Lead the conversation of ``tool_agent`` over one HTTP connection."""
    url, messages = urlsplit(task.base_url), list(task.messages)
    connection = http.client.HTTPConnection(url.netloc)
    headers = {"Authorization": f"Bearer {task.api_key}"}
    while True:
        body = json.dumps({"messages": messages, "tools": [Look.schema]})
        connection.request("POST", f"{url.path}/chat/completions", body, headers)
        answer = json.load(connection.getresponse())["choices"][0]
        if answer["finish_reason"] != "tool_calls":
            return connection.close()
        messages += [answer["message"], {"role": "tool", "content": "There are 7 keys in the drawer."}]


def measure(loop: AgentLoop, engine: NullEngine, conversations: int, prompt: list[int]) -> tuple[float, int]:
    """Return the median seconds of a round and its number of policy turns."""
    params, seconds, turns = SamplingParams(max_new_tokens=100_000), [], 0
    for _ in range(ROUNDS):
        engine.turns = {}
        talks = [
            Conversation(
                [{"role": "user", "content": "How many keys?"}],
                params,
                prompt,
                key=str(number),
                agent_name="it",
                limits=ConversationLimits(100_000),
            )
            for number in range(conversations)
        ]
        start = time.perf_counter()
        run = loop.endpoint.run if loop.endpoint else asyncio.run
        trajectories = run(run_all(talks, {"it": loop}, engine, CONCURRENT))
        seconds.append(time.perf_counter() - start)
        assert not any(trajectory.error for trajectory in trajectories)
        turns = sum(engine.turns.values())
    return sorted(seconds)[len(seconds) // 2], turns


def main() -> None:
    """Print the table."""
    tokenizer = merging_tokenizer()
    parent_pipe, child_pipe = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(child_pipe,), daemon=True)
    server.start()
    url = parent_pipe.recv()
    prompt = ids_of(tokenizer, "<|im_start|>user\nHow many keys are in the drawer?<|im_end|>\n<|im_start|>assistant\n")
    call = f"<tool_call>{json.dumps({'name': 'look', 'arguments': {}})}</tool_call><|im_end|>"
    search = "<think>I do not know.</think><search>drawer keys</search>"
    answer = ids_of(tokenizer, "<answer>7</answer>")
    external = ExternalAgent(look_over_http)
    limits = ExternalRequestLimits(SamplingParams(max_new_tokens=100), 1000, 1.0)
    external.endpoint = Endpoint(ChatFormat(tokenizer, find_parser("hermes")), limits, EndpointAddress())
    cases = {
        "single_turn_agent": (SingleTurnLoop(), NullEngine(answer, answer), 8192),
        "tool_agent": (
            ToolLoop(tokenizer, {"look": ToolEntry(Look())}),
            NullEngine(ids_of(tokenizer, call), answer),
            256,
        ),
        "search_agent": (
            SearchLoop(tokenizer, RetrievalClient(RetrievalOptions(url)), max_turns=TURNS),
            NullEngine(ids_of(tokenizer, search), answer),
            256,
        ),
        "external_agent": (external, NullEngine(ids_of(tokenizer, call), answer), 256),
    }
    print(f"{'loop':<20}{'conversations':>14}{'turns each':>12}{'conversations/s':>17}{'ms per turn':>13}")
    with external.endpoint:
        for name, (loop, engine, count) in cases.items():
            seconds, turns = measure(loop, engine, count, prompt)
            print(f"{name:<20}{count:>14}{turns / count:>12.1f}{count / seconds:>17,.0f}{1e3 * seconds / turns:>13.3f}")
    print(f"\n{CONCURRENT} conversations at a time, median of {ROUNDS} rounds")
    server.terminate()


if __name__ == "__main__":
    main()
