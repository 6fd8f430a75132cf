"""Agent runners in real processes, over a replica with timed answers: loss and replacement of runners."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
from light_workers import timed_tokens
from support.expected_errors import raises
from support.object_store import store_bytes
from support.squares_task import make_squares_task
from support.task_configs import arithmetic, train_config  # noqa: F401
from support.vision_models import png
from support.waits import wait_until

from megarl.agents.frames import encode_prompt
from megarl.agents.turns import context_digest
from megarl.agents.types import ConversationGroup, SampleId, StoredTurn, Trajectory
from megarl.base.errors import ConfigError
from megarl.base.image_files import ImageProcessor
from megarl.base.image_tokens import Image, image_key, image_spans
from megarl.base.processes import wait_for_ends
from megarl.cluster import agent_runners
from megarl.cluster.agent_runners import AgentRunners, RunnersLost, replica_processes
from megarl.cluster.calls import WorkerFailed
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.stored_images import store_images
from megarl.cluster.worker_group import WorkerGroup
from megarl.data.images import data_url
from megarl.data.tokenizers import load_tokenizer
from megarl.models import ParallelLayout
from megarl.rollout.interface import Completion, SamplingParams
from megarl.rollout.router import NoReplicaLeft, ReplicaLost, Router

PARAMS = SamplingParams(5)
LOOPS = Path(__file__).with_name("runner_loops.py")


@pytest.fixture(scope="module")
def pool(forked_workers):
    with RaySession(num_cpus=1) as session:
        yield session.place([ResourcePool("main", "cpu", [1])])["main"]


@pytest.fixture(scope="module")
def replica(pool):
    worker = "tests.cluster.light_workers.TimedReplica"
    return WorkerGroup("rollout", worker, {"seconds": 0.6}, ParallelLayout(dp=1), pool, threads=6)


@pytest.fixture
def runners(
    pool,
    train_config,  # noqa: F811
):
    started: list[AgentRunners] = []

    def start(count, changes=None):
        keys = {"agent.num_workers": count, "health.timeout_s": 60.0}
        config = train_config(
            {f"actor_rollout_ref.rollout.{name}": value for name, value in keys.items()} | (changes or {})
        )
        started.append(AgentRunners(config, load_tokenizer(config.actor_rollout_ref.model.path), pool))
        assert bool(started[-1].wait_ready()) == config.actor_rollout_ref.rollout.serves_endpoint
        return started[-1]

    yield start
    for service in started:
        service.__exit__(None, None, None)
    pool.processes.groups[1:] = []


def groups_of(count, agent_name="single_turn_agent"):
    return [
        ConversationGroup(
            number=number,
            messages=(),
            prompt_ids=np.array([3, number], np.int32),
            params=[PARAMS] * 2,
            seeds=[10 * number, 10 * number + 1],
            key=str(number),
            agent_name=agent_name,
        )
        for number in range(count)
    ]


def lead(service, replicas, count, strikes=None):
    """Lead conversations to their end; after each of the first reports, one strike."""
    service.open(replicas)
    service.submit(groups_of(count))
    responses: dict[SampleId, list[int]] = {}
    while len(responses) < 2 * count:
        samples = service.finished(1.0)
        for name, trajectory in samples.items():
            assert name not in responses
            assert trajectory.response_ids.dtype == np.int32 and trajectory.log_probs.dtype == np.float32
            responses[name] = trajectory.response_ids.tolist()
        if samples and strikes:
            strikes.pop(0)()
    return responses, service.close().runners_lost


def expected(count):
    return {
        SampleId(number, sample): timed_tokens([3, number], 10 * number + sample)
        for number in range(count)
        for sample in range(2)
    }


def signal_runner(service, rank, number):
    os.kill(service._group.processes[rank].pid, number)


def test_other_runners_repeat_the_conversations_of_a_lost_one(
    runners,
    replica,
    caplog,
    monkeypatch,
):
    service, replicas = runners(2), replica_processes(replica)
    first = [service._group.processes[rank].pid for rank in range(2)]
    assert lead(service, replicas, 12) == (expected(12), 0)
    assert replica.call("state") == [(0, 2)], "both runners were used"

    with caplog.at_level(logging.WARNING):
        killed = lead(service, replicas, 12, [lambda: signal_runner(service, 0, signal.SIGKILL)])
    assert killed == (expected(12), 1)
    assert "agent runner 0 is lost, " in caplog.text and "[worker.died]" in caplog.text
    assert replica.call("state")[0][0] == 0, "no request of the lost runner is running"
    assert service._group.processes[0].pid != first[0], "it was replaced"

    caplog.clear()
    monkeypatch.setattr(service, "_timeout_s", 6.0)
    frozen = lead(service, replicas, 12, [lambda: signal_runner(service, 1, signal.SIGSTOP)])
    assert frozen == (expected(12), 1) and "6 s [worker.no-answer]" in caplog.text
    monkeypatch.undo()

    # Both are lost, one after the other: the last one is replaced at once.
    strikes = [lambda: signal_runner(service, 1, signal.SIGKILL), lambda: signal_runner(service, 0, signal.SIGKILL)]
    assert lead(service, replicas, 24, strikes) == (expected(24), 2)


def test_images_of_a_lost_runner_are_read_by_the_next(runners, replica):
    """The driver owns the files: a repeated conversation has its images. No process keeps the files of ended ones."""
    service, files = runners(2), [os.urandom(200_000) for _ in range(12)]
    images = [store_images([Image.of(file, 2, 2)]) for file in files]
    groups = [
        replace(group, prompt_ids=np.array(image.token_ids), facts={"images": (image,)})
        for group, [image] in zip(groups_of(12), images, strict=True)
    ]
    service.open(replica_processes(replica))
    service.submit(groups)
    ended = service.finished(30.0)
    signal_runner(service, 0, signal.SIGKILL)
    while len(ended) < 24:
        ended |= service.finished(1.0)
    del groups, images
    wait_until(lambda: store_bytes() < 200_000)
    assert service.close().runners_lost == 1
    [seen] = replica.call("seen_digests")
    assert seen == {image_key(file): image_key(file) for file in files}


def test_an_external_agent_gets_stored_pictures_and_shows_others(runners, replica, tmp_path):
    """The runner reads the prompt's file from the object store; the engine gets both pictures."""
    model = str(make_squares_task(tmp_path / "squares") / "model")
    agent = {"actor_rollout_ref.rollout.agent.external_agent": f"{LOOPS}:shows_another_picture"}
    sizes = {"data.max_prompt_length": 64, "data.max_response_length": 64}
    service = runners(1, {"actor_rollout_ref.model.path": model, **agent, **sizes})
    processor, tokenizer = ImageProcessor(model), load_tokenizer(model)
    first, later = (processor.read(png(56, 56, seed), "a picture") for seed in (1, 2))
    [stored] = store_images([first])
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many squares?"}]}]
    token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    ids = np.array(encode_prompt(tokenizer, messages, images=[first], image_token=token))
    [group] = groups_of(1, "external_agent")
    facts = {"images": (stored,), "later": data_url(later)}
    service.open(replica_processes(replica))
    service.submit([replace(group, messages=messages, prompt_ids=ids, facts=facts)])
    ended: dict[SampleId, Trajectory] = {}
    while len(ended) < 2:
        ended |= service.finished(1.0)
    service.close()
    for trajectory in ended.values():
        assert trajectory.error is None and trajectory.fields["agent_result"] == {"digest": str(first.key)}
        assert [(image.key, image.data) for image in trajectory.images] == [(later.key, later.data)]
        assert trajectory.num_turns == 4 and trajectory.metrics["branches_dropped"] == 0
        assert trajectory.prompt_ids.tolist() == ids.tolist()
        assert [span.key for span in image_spans(trajectory.response_ids)] == [later.key]
    [seen] = replica.call("seen_digests")
    assert all(seen[image.key] == image.key for image in (first, later))


def test_statistics_are_taken_while_conversations_go_on(runners, replica):
    """A service that is open for a whole run replaces lost runners there, and keeps no group that has ended."""
    service = runners(2)
    service.open(replica_processes(replica))
    service.submit(groups_of(6))
    signal_runner(service, 0, signal.SIGKILL)
    ended = service.finished(30.0)
    while len(service._runners) == 2:  # the loss is noticed with a report
        ended |= service.finished(1.0)
    first = service.take_stats()
    assert first.runners_lost == 1 and first.busy_s[0] > 0 and len(service._runners) == 2
    service.submit([replace(group, number=6 + group.number) for group in groups_of(2)])
    while len(ended) < 16:
        ended |= service.finished(1.0)
    assert service._groups == {} == service._unfinished
    later = service.take_stats()
    assert later.runners_lost == 0 and 0 < later.busy_s[0] <= later.served_s[0]
    assert service.close().runners_lost == 0


def test_turns_of_unfinished_conversations_are_stored(runners, replica):
    """Conversations of a lost runner have none. A conversation resumes after its turns, on the same service."""
    service = runners(2)
    service.open(replica_processes(replica))
    groups = [replace(group, with_turns=True) for group in groups_of(6)]
    replica.call("hold", True)
    try:
        service.submit(groups)
        assert service.stored_turns() == {name: [] for group in groups for name in group.ids}
        signal_runner(service, 0, signal.SIGKILL)
        lost = service._runners[0].running
        assert lost and all(service.stored_turns()[name] == () for name in lost)
    finally:
        replica.call("hold", False)
    ended: dict[SampleId, Trajectory] = {}
    while len(ended) < 12:
        ended |= service.finished(1.0)
    assert service.stored_turns() == {}
    assert {name: trajectory.response_ids.tolist() for name, trajectory in ended.items()} == expected(6)

    part = Completion("r", [1, 2], [-0.5, -0.5], "abort", 1)
    whole = replace(part, token_ids=[9, 9, 9], log_probs=[-0.5] * 3, finish_reason="stop")
    contexts = [context_digest([3, 0], seed) for seed in (0, 1)]
    turns = [[StoredTurn.of(context, turn)] for context, turn in zip(contexts, (whole, part), strict=True)]
    service.submit([replace(groups[0], number=9, turns=dict(enumerate(turns)))])
    samples: dict[SampleId, list[int]] = {}
    while len(samples) < 2:
        samples |= {name: trajectory.response_ids.tolist() for name, trajectory in service.finished(1.0).items()}
    assert samples[SampleId(9, 0)] == [9, 9, 9], "it needs no engine"
    assert samples[SampleId(9, 1)] == timed_tokens([3, 0], 1)
    service.close()


def test_reports_that_wait_for_the_driver_are_no_silence(
    runners,
    replica,
    caplog,
    monkeypatch,
):
    """Both reports are ready after a pause that is longer than the limit, such as an update; one is read first."""
    service = runners(2)
    service.open(replica_processes(replica))
    service.submit(groups_of(6))
    assert service.finished(0.0) == {}, "the reports are requested"
    reports = [runner.report[0].ref for runner in service._runners.values()]
    assert len(ray.wait(reports, num_returns=2, timeout=60)[0]) == 2
    monkeypatch.setattr(agent_runners, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 600))
    responses: dict[SampleId, list[int]] = {}
    while len(responses) < 12:
        responses |= {name: trajectory.response_ids.tolist() for name, trajectory in service.finished(1.0).items()}
    assert (responses, service.close().runners_lost) == (expected(6), 0) and "is lost" not in caplog.text


def test_errors_of_a_runner_reach_the_driver(
    runners,
    replica,
    monkeypatch,
    caplog,
):
    service, replicas = runners(1), replica_processes(replica)
    service.open(replicas)
    service.submit(groups_of(1, "no_such_loop"))
    with raises("config.unknown-name", "no_such_loop", error=ConfigError):
        service.finished(30.0)
    service.close()

    # One conversation fails, and its loop logs a warning.
    service.open(replicas)
    service.submit(groups_of(1, f"{LOOPS}:Failing"))
    samples = {}
    while len(samples) < 2:
        samples |= service.finished(1.0)
    assert all("broken tool" in str(trajectory.error) for trajectory in samples.values())
    assert "the tool is about to break" in caplog.text
    service.close()

    # A loop that ends its process does so on every runner.
    monkeypatch.setattr(agent_runners, "MOST_LOST", 1)
    service.open(replicas)
    service.submit(groups_of(1, f"{LOOPS}:Deadly"))
    with raises("agent.runners-lost", "2 agent runners", "agents rank 0", error=RunnersLost):
        while True:
            service.finished(1.0)
    service.close()
    assert lead(service, replicas, 2) == (expected(2), 0)


def test_dead_replica_is_reported_and_replaced(pool):
    """The other replica keeps serving; the new process has no state of the old one."""
    worker = "tests.cluster.light_workers.Answerer"
    group = WorkerGroup("rollout", worker, {}, ParallelLayout(dp=2), pool, threads=2)
    pids = group.init_model()
    replicas = replica_processes(group)

    async def ask(rank, *requests):
        await replicas[rank].accept("router", list(requests), [])
        return await replicas[rank].completions("router", 10.0)

    async def ask_while_waiting(rank, *requests):
        """A request reaches a replica that waits for completions."""
        waiting = asyncio.create_task(pickle.loads(pickle.dumps(replicas[rank])).completions("other", 60.0))
        await asyncio.sleep(0.5)
        await replicas[rank].accept("router", list(requests), [])
        return await waiting

    assert asyncio.run(ask_while_waiting(1, "a")) == [(1, True, "a")]
    with raises("worker.raised", "rollout rank 0", "accept: ValueError: not finite", error=WorkerFailed):
        asyncio.run(ask(0, "raise"))
    assert asyncio.run(ask(0, "b")) == [(0, True, "b")]
    with raises("sglang.engine-lost", "rollout rank 0", "accept: WorkerLost", error=ReplicaLost):
        asyncio.run(ask(0, "lose"))

    async def both():
        return await asyncio.gather(ask(0, "die"), ask(1, "c"), return_exceptions=True)

    lost, answered = asyncio.run(both())
    assert isinstance(lost, ReplicaLost) and f"rollout rank 0 (pid {pids[0]}" in lost.text
    assert lost.code == "worker.died"
    assert answered == [(1, True, "c")]
    group.restart([0])
    replicas = replica_processes(group)
    assert asyncio.run(ask(0, "d")) == [(0, False, "d")]
    (new,) = group.submit_on([0], "init_model").result()
    assert new not in pids and asyncio.run(ask(0, "e")) == [(0, True, "e")]
    assert group.init_model() == [new, pids[1]]
    with pytest.raises(TypeError, match="use handle"):
        group.submit("accept", "router", [], [])

    # A frozen process does not answer, so the router's time limit finds it; its replacement ends it.
    frozen = psutil.Process(new)
    frozen.suspend()

    async def route():
        async with Router({0: replicas[0]}, 1, timeout_s=1.0) as router:
            await router.generate([1], SamplingParams(1), seed=0)

    with raises("rollout.no-replica-left", "no answer within 1 s", error=NoReplicaLeft):
        asyncio.run(route())
    group.restart([0])
    assert group.submit_on([0], "init_model").result() != [new]
    wait_for_ends([frozen], 30)
    assert not frozen.is_running()
    group.shutdown()
