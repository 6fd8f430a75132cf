"""Overhead of agent loops and agent runners, with null engines.

    python benchmarks/agents.py

``loops``: the null engine answers at once in this process, so all time is spent in the loops: asyncio, tokenization,
parsing, chat template. ``search_agent`` calls a real retrieval server in a separate process. ``external_agent`` is a
function with a plain HTTP client, in one thread per conversation.

``runners``: a real Ray session with agent runners and two replicas in processes of their own, as in a training job. A
null engine sleeps for each decoding step and computes nothing. ``CPU per turn`` is the time of driver, runners and
replicas per generated turn. ``utilization`` is the share of the run's time in which engines work; ``occupied`` is the
mean share of their slots in use, and ``limit`` its maximum, if each turn began at once.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/agents"), str(ROOT / "tools")]

import make_arithmetic  # noqa: E402
from agent_cases import ids_of, lead_all, merging_tokenizer  # noqa: E402
from machine import benchmark_parser, parse_sizes  # noqa: E402
from retrieval_server import BM25Index, Document, RetrievalServer  # noqa: E402
from support.dotted_keys import set_keys  # noqa: E402

from megarl.agents import AgentLoop, AgentTask, Conversation, ConversationLimits, Transcript  # noqa: E402
from megarl.agents.endpoint import ChatFormat, Endpoint, EndpointAddress, ExternalRequestLimits  # noqa: E402
from megarl.agents.event_loop import EventLoopThread  # noqa: E402
from megarl.agents.external_agent import ExternalAgent  # noqa: E402
from megarl.agents.loop import SingleTurnLoop, turn_seed  # noqa: E402
from megarl.agents.retrieval_client import RetrievalClient, RetrievalOptions  # noqa: E402
from megarl.agents.search_agent import SearchLoop  # noqa: E402
from megarl.agents.tool_agent import ToolLoop  # noqa: E402
from megarl.agents.tools import PARSERS, Tool, ToolEntry  # noqa: E402
from megarl.agents.types import ConversationGroup  # noqa: E402
from megarl.cluster.agent_runners import (  # noqa: E402
    AgentRunners,
    ReplicaProcess,
    replica_processes,
)
from megarl.cluster.fork_server import fork_server  # noqa: E402
from megarl.cluster.resources import ResourcePool  # noqa: E402
from megarl.cluster.session import RaySession  # noqa: E402
from megarl.cluster.worker_group import WorkerGroup  # noqa: E402
from megarl.config import GenerateConfig  # noqa: E402
from megarl.config.build import build  # noqa: E402
from megarl.data.tokenizers import load_tokenizer  # noqa: E402
from megarl.models import ParallelLayout  # noqa: E402
from megarl.rollout import Completion, Request, SamplingParams  # noqa: E402
from megarl.rollout.serving import EngineServer  # noqa: E402
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb  # noqa: E402

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
        run = loop.endpoint.loop.run if loop.endpoint else asyncio.run
        trajectories = [
            trajectory
            for first in range(0, conversations, CONCURRENT)
            for trajectory in run(lead_all(talks[first : first + CONCURRENT], {"it": loop}, engine))
        ]
        seconds.append(time.perf_counter() - start)
        assert not any(trajectory.error for trajectory in trajectories)
        turns = sum(engine.turns.values())
    return sorted(seconds)[len(seconds) // 2], turns


def measure_loops(most: int) -> None:
    """Print the overhead of each loop, with at most ``most`` conversations."""
    tokenizer = merging_tokenizer()
    parent_pipe, child_pipe = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=serve, args=(child_pipe,), daemon=True)
    server.start()
    url = parent_pipe.recv()
    prompt = ids_of(tokenizer, "<|im_start|>user\nHow many keys are in the drawer?<|im_end|>\n<|im_start|>assistant\n")
    call = f"<tool_call>{json.dumps({'name': 'look', 'arguments': {}})}</tool_call><|im_end|>"
    search = "<think>I do not know.</think><search>drawer keys</search>"
    answer = ids_of(tokenizer, "<answer>7</answer>")
    external = ExternalAgent(look_over_http)
    limits = ExternalRequestLimits(SamplingParams(max_new_tokens=100), 1000, 1.0)
    chat = ChatFormat(tokenizer, PARSERS["hermes"])
    external.endpoint = Endpoint(chat, limits, EndpointAddress(), EventLoopThread("endpoint"))
    cases = {
        "single_turn_agent": (SingleTurnLoop(), NullEngine(answer, answer), 4096),
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
        for name, (loop, engine, usual) in cases.items():
            count = min(most, usual)
            seconds, turns = measure(loop, engine, count, prompt)
            print(f"{name:<20}{count:>14}{turns / count:>12.1f}{count / seconds:>17,.0f}{1e3 * seconds / turns:>13.3f}")
    print(f"\n{CONCURRENT} conversations at a time, median of {ROUNDS} rounds")
    server.terminate()


REPLICAS, STEP_S = 2, 0.004
LENGTHS = (8, 40)
"""Shortest and longest response of a turn, in decoding steps; equally likely."""
OBSERVATION = list(range(20))


class SteppingEngine:
    """Sleeps for each decoding step of its running requests; a request's seed gives its length."""

    def __init__(self, slots: int) -> None:
        self.slots, self.waiting, self.running = slots, [], {}
        self.interrupted = threading.Event()
        self.busy_s = self.slot_s = 0.0

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self.waiting += requests

    def abort(self, request_ids: Iterable[str]) -> None:
        """Nothing is aborted."""

    def interrupt_poll(self) -> None:
        """End the poll after its step."""
        self.interrupted.set()

    def poll(self, timeout_s: float) -> list[Completion]:
        """Run steps until a request ends."""
        deadline, done = time.monotonic() + timeout_s, []
        while not (done or self.interrupted.is_set()) and (self.waiting or self.running):
            while self.waiting and len(self.running) < self.slots:
                request = self.waiting.pop(0)
                self.running[request.request_id] = turn_length(request.seed), turn_length(request.seed)
            began = time.monotonic()
            time.sleep(STEP_S)
            passed = time.monotonic() - began
            self.busy_s += passed
            self.slot_s += passed * len(self.running) / self.slots
            self.running = {name: (left - 1, length) for name, (left, length) in self.running.items()}
            for name, (left, length) in list(self.running.items()):
                if not left:
                    del self.running[name]
                    done.append(Completion(name, [1] * length, [0.0] * length, "stop", 0))
            if time.monotonic() >= deadline:
                break
        self.interrupted.clear()
        return done


def turn_length(seed: int) -> int:
    """Length of a turn."""
    return LENGTHS[0] + seed % (LENGTHS[1] - LENGTHS[0] + 1)


class NullReplica:
    """A replica with a stepping engine."""

    def __init__(self, place: WorkerPlace, slots: int) -> None:
        self.engine = SteppingEngine(slots)
        self.server = EngineServer(self.engine)

    @verb(Dispatch.RANK)
    def accept(self, client: str, requests: Sequence[Request], aborted: Sequence[str]) -> None:
        """See :class:`EngineServer`."""
        self.server.accept(client, requests, aborted)

    @verb(Dispatch.RANK)
    def completions(self, client: str, wait_s: float) -> list[Completion]:
        """See :class:`EngineServer`."""
        return self.server.completions(client, wait_s)

    @verb(Dispatch.RANK)
    def forget(self, client: str) -> None:
        """See :class:`EngineServer`."""
        self.server.forget(client)

    @verb(Dispatch.ALL)
    def load(self) -> tuple[float, float]:
        """Seconds in which the engine worked, and slot-seconds in use."""
        return self.engine.busy_s, self.engine.slot_s


class FourTurns(AgentLoop):
    """Four turns, each followed by a fixed observation."""

    async def run(self, conversation: Conversation, generate: Any) -> Any:
        """Lead one conversation."""
        transcript = Transcript(conversation)
        for _ in range(TURNS):
            await transcript.generate(generate)
            transcript.observe(OBSERVATION)
        return transcript.end("turns")


def measure_runners(conversations: int, runners: int, folder: Path) -> None:
    """Lead conversations of four turns, all at once; print one line."""
    rollout = "actor_rollout_ref.rollout"
    values = {
        f"{rollout}.agent.num_workers": runners,
        f"{rollout}.max_num_seqs": conversations // REPLICAS,
        "data.max_response_length": 4 * (LENGTHS[1] + len(OBSERVATION)),
    }
    config = build(GenerateConfig, set_keys({}, {**task_keys(folder), **values}), str(folder))
    groups = [
        ConversationGroup(
            number=number,
            messages=(),
            prompt_ids=np.arange(64, dtype=np.int32),
            params=[SamplingParams(LENGTHS[1])],
            seeds=[7919 * number],
            key=str(number),
            agent_name=f"{__file__}:FourTurns",
        )
        for number in range(conversations)
    ]
    with fork_server(), RaySession(num_cpus=REPLICAS) as session:
        pool = session.place([ResourcePool("main", "cpu", [REPLICAS])])["main"]
        kwargs = {"slots": conversations // REPLICAS}
        replicas = WorkerGroup("rollout", NullReplica, kwargs, ParallelLayout(dp=REPLICAS), pool, threads=runners + 2)
        service = AgentRunners(config, load_tokenizer(str(folder / "model")), pool)
        service.wait_ready()
        lead(service, replica_processes(replicas), groups[:REPLICAS])
        pids = [member.pid for member in pool.processes.members()]
        cpu, loads, began = cpu_seconds(pids), replicas.call("load"), time.perf_counter()
        lead(service, replica_processes(replicas), groups)
        wall = time.perf_counter() - began
        cpu = [after - before for after, before in zip(cpu_seconds(pids), cpu, strict=True)]
        busy, slots = (np.mean(np.array(replicas.call("load")) - np.array(loads), axis=0) / wall).tolist()
    steps = [sum(turn_length(turn_seed(7919 * n, turn)) for turn in range(TURNS)) for n in range(conversations)]
    limit = sum(steps) / conversations / max(steps)
    turns = conversations * TURNS
    print(
        f"{conversations:>13,}{runners:>9}{1e6 * sum(cpu) / turns:>13.0f} us{1e6 * cpu[0] / turns:>10.0f} us"
        f"{busy:>13.1%}{slots:>10.1%}{limit:>8.1%}{wall:>8.2f} s",
        flush=True,
    )


def lead(service: AgentRunners, replicas: Mapping[int, ReplicaProcess], groups: Sequence[ConversationGroup]) -> None:
    """Lead conversations to their end."""
    service.open(replicas)
    service.submit(groups)
    waiting = len(groups)
    while waiting:
        samples = service.finished(1.0)
        assert not any(trajectory.error for trajectory in samples.values())
        waiting -= len(samples)
    service.close()


def cpu_seconds(pids: Sequence[int]) -> list[float]:
    """CPU seconds of this process and of others."""
    times = [psutil.Process(pid).cpu_times() for pid in [os.getpid(), *pids]]
    return [one.user + one.system for one in times]


def task_keys(folder: Path) -> dict[str, Any]:
    """Keys of a job whose model is the small arithmetic task's."""
    if not (folder / "model").is_dir():
        make_arithmetic.main(["--out", str(folder), "--hidden", "32", "--lessons", "1", "1", "--pairs", "1", "1"])
    model = {"actor_rollout_ref.model.path": str(folder / "model"), "data.prompts": ["1"]}
    return model | {"trainer.device": "cpu", "trainer.experiment_name": "agents"}


def main() -> None:
    """Print the tables."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--part", choices=("loops", "runners", "all"), default="all")
    parser.add_argument("--conversations", type=int, default=4096, help="most conversations of a case")
    args = parse_sizes(parser, conversations=64)
    if args.part != "runners":
        measure_loops(args.conversations)
    if args.part == "loops":
        return
    names = f"{'conversations':>13}{'runners':>9}{'CPU per turn':>16}{'driver':>13}"
    print(f"\n{names}{'utilization':>13}{'occupied':>10}{'limit':>8}{'wall':>10}")
    with tempfile.TemporaryDirectory() as folder:
        most = args.conversations
        cases = ((most // 16, 1), (most // 4, 1), (most, 1), (most, 2))
        for conversations, runners in cases[:1] if args.tiny else cases:
            measure_runners(conversations, runners, Path(folder))


if __name__ == "__main__":
    main()
