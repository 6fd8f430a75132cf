"""The rollout service with a real engine in this process: seeds and order, streaming, staleness, and resume."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.expected_errors import raises
from support.squares_task import make_squares_task

from megarl.agents.runner import AgentRunner
from megarl.agents.types import Trajectory
from megarl.base.errors import StepImpossible, WeightSyncError
from megarl.base.image_tokens import Image
from megarl.base.signals import sleep, wait_slices
from megarl.config import RolloutConfig
from megarl.data.loader import PromptQueue
from megarl.data.tokenizers import load_tokenizer
from megarl.rewards import RewardManager, in_driver
from megarl.rollout.embedded.generation import ContinuousBatcher
from megarl.rollout.interface import NO_VERSION
from megarl.rollout.router import NoReplicaLeft
from megarl.samples.ledger import check_staleness, staleness_metrics
from megarl.samples.replicas import ColocatedReplicas, DisaggregatedReplicas, Replicas
from megarl.samples.reward_functions import runner_scorers
from megarl.samples.reward_phase import RewardPhase
from megarl.samples.rollouts import Rollouts
from megarl.samples.service import SampleService, restored_ledger
from megarl.trainer.phases.data_loading import prompt_loader
from megarl.trainer.state.trainer_state import Decoder, Encoder
from megarl.workers.dispatch import WorkerPlace
from megarl.workers.rollout import RolloutWorker
from megarl.workers.settings import RolloutSettings
from tests.samples.phase_rewards import CALLS

FUNCTIONS = Path(__file__).with_name("phase_rewards.py")
STEPS = 3
MODES = {"sync": Replicas, "colocated": ColocatedReplicas, "disaggregated": DisaggregatedReplicas}


class WorkerReplica:
    """A worker as a replica of the router; it serves with the server that a sync interrupts."""

    def __init__(self, model):
        settings = RolloutSettings(model, "cpu", RolloutConfig(dtype="float32", max_num_seqs=4))
        self.worker = RolloutWorker(WorkerPlace(0, 1, "127.0.0.1", 0), settings=settings)
        self.worker.init_model()

    async def accept(self, client, requests, aborted):
        self.worker.accept(client, requests, aborted)

    async def completions(self, client, wait_s):
        return await asyncio.to_thread(self.worker.completions, client, wait_s)


class OneEngine:
    """A single replica and its sharding manager: a sync loads the same weights as the next version, maybe elsewhere."""

    def __init__(self, model):
        self.model, self.loses_replica, self.replica = model, False, WorkerReplica(model)
        self.version, self.in_sync = 0, True
        self.group: Any = SimpleNamespace(ranks=[0], world_size=1, role="rollout")

    @property
    def worker(self):
        return self.replica.worker

    def processes(self):
        return {0: self.replica}

    def sync_weights(self):
        self.version += 1
        self.worker.wake(("weights", "kv_cache"))
        self.worker.engine.load_hf(self.model, self.version)
        return {}

    def sync_weights_in_flight(self):
        held = self.worker.pause()
        if self.loses_replica:
            self.replica = WorkerReplica(self.model)
        metrics = self.sync_weights()
        self.worker.resume()
        return metrics, [held]

    def pause_engines(self):
        self.worker.pause()
        self.worker.sleep(("weights", "kv_cache"))

    def free_engines(self):
        pass


def length(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))


@pytest.fixture(scope="module")
def engine(arithmetic):
    return OneEngine(str(arithmetic / "model"))


@pytest.fixture
def make(engine, train_config):
    runners: list[AgentRunner] = []

    def build(
        staleness,
        interval=1,
        tokens=6,
        partial=False,
        colocated=False,
        scored=False,
        reward=length,
        engine=engine,
        **changes,
    ):
        """A source of samples; staleness None = synchronous. The trainer's sync comes first, as in a run.

        With ``scored`` the runner calls the function ``counted`` in processes, with the scores of ``length``.
        """
        keys = {} if staleness is None else {
            "async_training.mode": "disaggregated", "async_training.max_staleness": staleness,
            "async_training.sync_interval": interval, "actor_rollout_ref.rollout.nnodes": 1,
            "actor_rollout_ref.rollout.calculate_log_probs": True, "algorithm.rollout_correction.rollout_is": "token",
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8 // interval, "async_training.partial_rollout": partial,
        }  # fmt: skip
        if colocated:
            keys |= {"async_training.mode": "colocated", "actor_rollout_ref.rollout.nnodes": 0}
        keys |= {"data.max_response_length": tokens, "actor_rollout_ref.rollout.n": 2}
        keys |= {"actor_rollout_ref.model.path": engine.model}
        keys |= {name.replace("__", "."): value for name, value in changes.items()}
        config = train_config({**keys, "actor_rollout_ref.rollout.max_num_seqs": 4})
        assert config.data.train_batch_size == 8
        tokenizer = load_tokenizer(engine.model)
        counted = {"reward.functions": {f"{FUNCTIONS}:counted": 1.0}, "reward.num_workers": 2}
        scorers = runner_scorers(train_config(counted)) if scored else {}
        runners.append(AgentRunner(config, tokenizer, scorers=scorers))
        rollouts = Rollouts(runners[-1], engine.processes, config, tokenizer)
        manager = RewardManager(in_driver(reward), tokenizer)
        rewards = RewardPhase(manager, tokenizer, config.reward)
        prompts = PromptQueue(prompt_loader(config, tokenizer))
        engine.version, engine.loses_replica = 0, False
        replicas = MODES[config.async_training.mode](engine.group, lambda ranks: engine, dict)
        replicas.processes = engine.processes
        return SampleService(config, restored_ledger(config, STEPS), prompts, rollouts, rewards, replicas)

    yield build
    for runner in runners:
        with contextlib.suppress(Exception):
            runner.close()
        runner.shutdown()


def steps_of(source, first=1, last=STEPS):
    for step in range(first, last + 1):
        for batch, metrics in source.batches(step, lambda name: contextlib.nullcontext()):
            yield step, batch, metrics
        source.sync_weights()


def rows(batch):
    columns = batch.non_tensor_batch
    lengths = batch.tensors["attention_mask"].sum(-1).tolist()
    scores = batch.tensors["token_level_scores"].sum(-1).tolist()
    truths = [model["ground_truth"] for model in columns["reward_model"]]
    results = zip(lengths, scores, columns["finish_reason"].tolist(), strict=True)
    return list(zip(columns["uid"].tolist(), truths, results, strict=True))


def test_staleness_0_gives_the_samples_of_synchronous_training(make, engine):
    def run(source):
        engine.sync_weights()
        return [rows(batch) for _, batch, _ in steps_of(source)]

    samples, service = run(make(None)), run(make(0))
    assert samples == service == run(make(0, partial=True, colocated=True)) and len(service) == STEPS
    assert [row[0] for row in service[1][::2]] == [f"0-2-{place}" for place in range(8)]


def test_mini_batches_stream_within_the_bound(make, engine):
    service = make(1, 4)
    engine.sync_weights()
    seen: list[Any] = []
    for step, batch, metrics in steps_of(service):
        assert len(batch) == 4
        assert metrics["fully_async/count/current_param_version"] == step
        assert metrics["training/off_policy/trajectory_staleness_worst"] <= 1
        seen.append(rows(batch))
    uids = [row[0] for batch in seen for row in batch]
    assert sorted(uids) == sorted(f"0-{step}-{place}" for step in (1, 2, 3) for place in range(8) for _ in range(2))
    assert service.ledger.untrained == [] and not service.rollouts.is_open


FILTER = {"algorithm__filter_groups__enable": True}


def digits(data_source, solution_str, ground_truth, extra_info):
    """A score that varies in about half of the groups."""
    return float(sum(map(ord, solution_str)) % 3 == 0)


def varied(samples):
    scores: dict[str, set[float]] = {}
    for uid, _, (_, score, _) in samples:
        scores.setdefault(uid, set()).add(score)
    return {uid for uid, values in scores.items() if len(values) > 1}


def test_dynamic_sampling_trains_the_first_varied_groups_in_every_mode(make, engine):
    """The batches are those of the sequence of groups without those of equal scores, whatever is admitted when."""
    build = functools.partial(make, reward=digits)
    whole = build(None)  # without a filter
    whole.ledger.rule = dataclasses.replace(whole.ledger.rule, total=None)
    engine.sync_weights()
    every = [row for _, batch, _ in steps_of(whole, last=8) for row in rows(batch)]
    expected = [row for row in every if row[0] in varied(every)]
    assert len(every) // 4 < len(expected) < len(every)

    def run(source):
        engine.sync_weights()
        steps = [(rows(batch), metrics) for _, batch, metrics in steps_of(source)]
        return [batch for batch, _ in steps], [metrics for _, metrics in steps]

    batches, metrics = run(build(None, **FILTER))
    assert batches == [expected[16 * step : 16 * step + 16] for step in range(STEPS)]
    last = every.index(batches[-1][-1]) // 2 + 1
    assert sum(values["filter_groups/asked"] for values in metrics) == last
    assert sum(values["filter_groups/dropped"] for values in metrics) == last - 8 * STEPS
    assert all(values["filter_groups/surplus"] == values["filter_groups/filled"] == 0 for values in metrics)
    # More prompts at once change the time, and not the batch; the rest starts again in the next step.
    eager, metrics = run(build(None, data__gen_batch_size=12, **FILTER))
    assert eager == batches and sum(values["filter_groups/surplus"] for values in metrics) > 0
    assert run(build(0, **FILTER))[0] == batches
    assert run(build(0, partial=True, colocated=True, **FILTER))[0] == batches
    # With staleness, batches are in the order of completion.
    free, _ = run(build(1, **FILTER))
    trained = [row[0] for batch in free for row in batch]
    assert len(trained) == 16 * STEPS and all(trained.count(uid) == 2 for uid in trained)
    assert set(trained) <= varied([row for batch in free for row in batch])


def test_dynamic_sampling_resumes_from_a_checkpoint(make, engine, tmp_path):
    build = functools.partial(make, None, reward=digits, data__gen_batch_size=12, **FILTER)
    undisturbed = build()
    engine.sync_weights()
    expected = [rows(batch) for _, batch, _ in steps_of(undisturbed)]
    stopped = build()
    stopped.restore({}, 0)
    engine.sync_weights()
    assert [rows(batch) for _, batch, _ in steps_of(stopped, last=1)] == expected[:1]
    resumed = build()
    resume(resumed, saved(stopped, tmp_path), tmp_path, 1)
    assert [rows(batch) for _, batch, _ in steps_of(resumed, 2)] == expected[1:]


@pytest.mark.parametrize("way", ["stop", "fill"])
def test_shortage_stops_or_fills_the_batch(make, engine, way):
    """12 prompts in 3 batches of 4 are allowed for a batch of 8."""
    keys = {"algorithm__filter_groups__max_num_gen_batches": 3, "data__gen_batch_size": 4}
    service = make(None, reward=digits, algorithm__filter_groups__on_shortage=way, **FILTER | keys)
    service.restore({}, 0)
    engine.sync_weights()
    seen = 0
    with contextlib.ExitStack() as stack:
        if way == "stop":
            stack.enter_context(raises("algorithm.too-few-groups", error=StepImpossible))
        for _, batch, metrics in steps_of(service):
            assert len(batch) == 16 and metrics["filter_groups/asked"] <= 12
            filled = 8 - len(varied(rows(batch)))
            assert metrics["filter_groups/filled"] == filled
            assert metrics["filter_groups/dropped"] == metrics["filter_groups/asked"] - 8 + filled
            assert metrics["train/num_gen_batches"] == -(-metrics["filter_groups/asked"] // 4)
            seen += filled
    assert way == "stop" or seen > 0


def test_greedy_baselines_are_samples_of_their_groups(make, engine):
    remax = {"algorithm__adv_estimator": "remax"}
    results = []
    for keys in ({"staleness": None}, {"staleness": 0}, {"staleness": 0, "partial": True, "colocated": True}):
        source = make(**keys, **remax)
        engine.sync_weights()
        batches = [batch for _, batch, _ in steps_of(source)]
        results.append([(rows(batch), batch.tensors["reward_baselines"].tolist()) for batch in batches])
    assert results[0] == results[1] == results[2]
    for samples, baselines in results[0]:
        assert len(samples) == 16 and baselines[::2] == baselines[1::2] and len(set(baselines)) > 1


@pytest.fixture(scope="module")
def synchronous():
    """Filled with the samples of synchronous training by the first test that needs them."""
    return []


def synchronous_samples(make, engine, known):
    if not known:
        source = make(None, tokens=100)
        engine.sync_weights()
        known += sorted(row for _, batch, _ in steps_of(source) for row in rows(batch))
    return known


@pytest.mark.parametrize(("colocated", "loses_replica"), [(False, False), (False, True), (True, False)])
def test_a_sync_interrupts_responses_and_loses_none(make, engine, synchronous, colocated, loses_replica):
    """The syncs of this test bring equal weights, so every sample is that of synchronous training.

    If a sync replaces the replica, its responses begin again; then no sample has two versions. In colocated mode the
    engine sleeps between the batch and the sync.
    """
    expected = synchronous_samples(make, engine, synchronous)
    service = make(2, tokens=100, partial=True, colocated=colocated)
    engine.loses_replica = loses_replica
    engine.sync_weights()
    found, mixed, interrupted = [], 0.0, []
    for step in range(1, STEPS + 1):
        for batch, metrics in service.batches(step, lambda name: contextlib.nullcontext()):
            assert metrics["training/off_policy/trajectory_staleness_worst"] <= 2
            mixed += metrics["fully_async/partial/total_partial_num"]
            assert metrics["fully_async/partial/max_partial_span"] <= 2
            found += rows(batch)
            assert bool(engine.worker.engine.asleep) == colocated
        in_flight = bool(service.ledger.running)
        synced = service.sync_weights()
        interrupted.append(synced["rollout_service/interrupted"])
        assert synced["rollout_service/sync_wait_s"] == 0.0 or not in_flight
        assert synced["rollout_service/recomputed_tokens"] >= 2 * interrupted[-1]
        assert 0 <= synced.get("rollout/replica_utilization/mean", 0.0) <= 1
        idle = {name: value for name, value in synced.items() if name.endswith("idle_ratio")}
        assert all(0 <= value <= 1 for value in idle.values()) and len(idle) == (0 if colocated else 2)
    assert sorted(found) == expected
    assert sum(interrupted) > 0 == interrupted[-1] and (mixed == 0) == loses_replica


def test_a_checkpoint_has_the_work_in_flight(make, engine, tmp_path):
    """A run that resumes after step 1 trains on the prompts and samples of the undisturbed run."""
    service = make(1)
    engine.sync_weights()
    first = list(steps_of(service, 1, 1))
    assert service.ledger.capacity == 0 and len(service.ledger.untrained) == 16
    for _ in range(3):  # some samples have ended, others are in flight
        service._receive(0.01)
    state = saved(service, tmp_path)
    rest = [rows(batch) for _, batch, _ in steps_of(service, 2)]

    resumed = make(1)
    decoded = resume(resumed, state, tmp_path, 1)
    assert engine.version == 2 and len(decoded["groups"]) == 16
    again = [rows(batch) for _, batch, _ in steps_of(resumed, 2)]
    assert sorted(row for batch in again for row in batch) == sorted(row for batch in rest for row in batch)
    trained = [row[0] for _, batch, _ in first for row in rows(batch)] + [row[0] for batch in rest for row in batch]
    assert len(trained) == STEPS * 16 and all(trained.count(uid) == 2 for uid in set(trained))


def saved(source, folder):
    """The state of a source in a checkpoint, and that of its prompts."""
    with (folder / "arrays").open("wb") as arrays:
        return json.loads(
            json.dumps(Encoder(arrays).encode(source.state_dict(), "rollout"))
        ), source.prompts.state_dict()


def resume(source, state, folder, step):
    """Restore a source after a step, and send the weights as a resumed trainer does."""
    decoded = Decoder(folder / "arrays").decode(state[0])
    source.prompts.load_state_dict(state[1])
    source.ledger.load_state_dict(decoded["ledger"])
    source.restore(decoded, step)
    source.replicas.sync_weights()
    return decoded


@pytest.mark.parametrize("colocated", [False, True])
def test_a_partial_rollout_resumes_after_its_stored_tokens(make, engine, synchronous, tmp_path, colocated):
    build = functools.partial(make, 2, tokens=100, partial=True, colocated=colocated)
    for _ in range(5):  # a slow test process may stop after the last response
        stopped = build()
        engine.sync_weights()
        version = engine.version
        trained = [row for _, batch, _ in steps_of(stopped, last=1) for row in rows(batch)]
        state = saved(stopped, tmp_path)
        stopped.close()
        if state[0]["turns"]:
            break
    resumed = build()
    stored = sum(len(turn["token_ids"]) for *_, turns in resume(resumed, state, tmp_path, 1)["turns"] for turn in turns)
    batches = [batch for _, batch, _ in steps_of(resumed, 2)]
    versions = np.concatenate([row.numpy() for batch in batches for row in batch.unpadded("weight_versions")])
    # Tokens of the first version can only come from the checkpoint: of its turns, and of its finished samples.
    assert 0 < stored <= (versions == version).sum()
    assert sorted([*trained, *(row for batch in batches for row in rows(batch))]) == synchronous_samples(
        make, engine, synchronous
    )


def test_prompts_in_flight_keep_their_images(make, tmp_path):
    """The state grows with the files of the prompts in flight, not with their samples."""
    folder = make_squares_task(tmp_path / "squares", "--num-train", "24")
    engine, files = OneEngine(str(folder / "model")), {"data__train_files": [str(folder / "data" / "train.parquet")]}
    build = functools.partial(make, tokens=24, engine=engine, data__val_files=[], **files)
    stopped = build(2, partial=True)
    engine.sync_weights()
    trained = [row for _, batch, _ in steps_of(stopped, last=1) for row in rows(batch)]
    state, groups = saved(stopped, tmp_path), dict(stopped._groups)
    stopped.close()
    in_flight = state[0]["groups"]
    assert 0 < len(in_flight) <= 16
    images = [image for group in in_flight for image in groups[group["number"]].facts["images"]]
    assert len(images) == len(in_flight)
    assert len(json.dumps(in_flight)) < sum(len(image.data) for image in images) * 4 / 3 + 2000 * len(in_flight)

    resumed = build(2, partial=True)
    resume(resumed, state, tmp_path, 1)
    for number, group in resumed._groups.items():
        assert group.facts["images"] == groups[number].facts["images"]
        assert all(isinstance(image, Image) and isinstance(image.data, bytes) for image in group.facts["images"])
        assert group.prompt_ids.tolist() == groups[number].prompt_ids.tolist() and group.prompt_ids.min() < 0
    trained += [row for _, batch, _ in steps_of(resumed, 2) for row in rows(batch)]
    undisturbed = build(None)
    engine.sync_weights()
    assert sorted(trained) == sorted(row for _, batch, _ in steps_of(undisturbed) for row in rows(batch))


def test_kills_at_any_moment_lose_no_sample_and_favour_no_length(make, engine, synchronous, tmp_path, monkeypatch):
    """A killed run resumes from its last step. Its samples are those of an undisturbed one, token counts included."""

    class Killed(Exception):
        pass

    def killing(end_sample, after):
        left = iter(range(after))

        def end(*name):
            if next(left, None) is None:
                raise Killed
            return end_sample(*name)

        return end

    random, kills = np.random.default_rng(3), 0
    for _ in range(4):
        state, step, trained = None, 0, []
        while step < STEPS:
            source = make(2, tokens=100, partial=True)
            monkeypatch.setattr(source.ledger, "end_sample", killing(source.ledger.end_sample, random.integers(60)))
            if state is None:
                engine.sync_weights()
            else:
                resume(source, state, tmp_path, step)
            try:
                while step < STEPS:
                    of_step = [row for _, batch, _ in steps_of(source, step + 1, step + 1) for row in rows(batch)]
                    state, step, trained = saved(source, tmp_path), step + 1, [*trained, *of_step]
            except Killed:
                kills += 1
                source.close()
        assert sorted(trained) == synchronous_samples(make, engine, synchronous)
    assert kills > 5


def test_a_run_whose_replicas_are_lost_saves_its_work_in_flight(make, engine, tmp_path, monkeypatch):
    """Turns of unfinished samples are lost with the replicas, those of an earlier checkpoint are kept."""

    def lost(wait_s):
        raise NoReplicaLeft("the only replica is lost", code="rollout.no-replica-left")

    advance, advances = ContinuousBatcher.advance, list[None]()

    def advance_slowly(batcher):
        time.sleep(0.005)  # the responses that are left take seconds
        advances.append(None)
        return advance(batcher)

    monkeypatch.setattr(ContinuousBatcher, "advance", advance_slowly)
    service = make(2, tokens=100, partial=True)
    engine.sync_weights()
    list(steps_of(service, last=1))
    wanted = len(advances) + 20
    for _ in wait_slices(60.0):
        if len(advances) >= wanted:
            break
        time.sleep(0.01)
    assert len(advances) >= wanted, "some responses are in flight, with tokens"
    state = saved(service, tmp_path)
    monkeypatch.setattr(service.rollouts.runners, "finished", lost)
    assert service.state_dict()["turns"] == [] and not service.rollouts.is_open

    resumed = make(2, tokens=100, partial=True)
    turns = resume(resumed, state, tmp_path, 1)["turns"]
    resumed._admit()
    monkeypatch.setattr(resumed.rollouts.runners, "finished", lost)
    again = resumed.state_dict()
    contexts = [
        [[*name, [turn["context"] for turn in each]] for *name, each in rows] for rows in (turns, again["turns"])
    ]
    assert contexts[0] == contexts[1] != []
    assert len(again["groups"]) == 16 + resumed.ledger.capacity and len(again["samples"]) == len(resumed._ended)


def test_validation_runs_beside_conversations_in_flight(make, engine):
    service = make(1)
    engine.sync_weights()
    service._admit()
    held_out = service.prompts.take(4)
    samples = service.rollouts.validate(held_out, 1)
    assert len(samples) == 4 and service.rollouts.is_open
    beside = service.rollouts.begin_validation(held_out, 1)  # goes on during the step; the sync waits for it
    trained = [row[0] for _, batch, _ in steps_of(service, 1, 1) for row in rows(batch)]
    assert len(trained) == 16 and all(uid.startswith("0-") for uid in trained)
    again = service.rollouts.end_validation(beside)
    assert [ids.tolist() for ids in again.unpadded("responses")] == [
        ids.tolist() for ids in samples.unpadded("responses")
    ]
    service.close()
    assert not service.rollouts.is_open


def test_samples_are_scored_while_the_trainer_trains(make, engine, tmp_path, monkeypatch):
    """Also around a validation, and after a resume, which scores no finished sample again; the scores stay the same."""
    calls = tmp_path / "calls"
    calls.mkdir()
    monkeypatch.setenv(CALLS, str(calls))

    def wait_for_calls(number):
        for _ in wait_slices(60.0):
            sleep(0.1)
            if len(list(calls.iterdir())) >= number:
                return
        raise TimeoutError(f"fewer than {number} samples were scored")

    expected_source = make(None)
    engine.sync_weights()
    expected = sorted(row for _, batch, _ in steps_of(expected_source) for row in rows(batch))

    service = make(1, scored=True)
    service.restore({}, 0)
    engine.sync_weights()
    seen = []
    for step, batch, metrics in steps_of(service):
        seen.append(rows(batch))
        assert metrics["reward/failed"] == 0
        wait_for_calls(min(16 * (step + 1), 16 * STEPS))  # the samples of the next batch, while this one is trained
        if step == 1:
            samples = service.rollouts.validate(expected_source.prompts.take(2), 1)
            validated = service.rewards.score(samples)
            assert len(validated.batch) == 2 and validated.metrics["reward/failed"] == 0
            for file in list(calls.iterdir())[:2]:
                file.unlink()
        if step == 2:
            while len(service.ledger.finished) < 8:
                service._receive(1.0)
            state = service.state_dict()
    assert sorted(row for batch in seen for row in batch) == expected
    assert len(list(calls.iterdir())) == 16 * STEPS
    service.close()

    resumed = make(1, scored=True)
    resumed.ledger.load_state_dict(state["ledger"])
    resumed.restore(state, 2)
    engine.sync_weights()
    assert [row for _, batch, _ in steps_of(resumed, 3) for row in rows(batch)] == seen[2]
    resumed.close()
    assert len(list(calls.iterdir())) == 16 * STEPS  # the checkpoint has the scores of the last step


def test_an_error_while_the_trainer_trains_is_raised_by_the_next_call(make, engine, monkeypatch):
    def lose(wait_s):
        raise ConnectionError("all engines are lost")

    service = make(1)
    engine.sync_weights()
    with pytest.raises(ConnectionError, match="all engines"):
        for _, _, _ in steps_of(service, 1, 1):
            monkeypatch.setattr(service.rollouts.runners, "finished", lose)
            for _ in wait_slices(60.0):
                if not service.rollouts.is_open:
                    break
                time.sleep(0.01)
            assert not service.rollouts.is_open
    assert service.state_dict()["ledger"]["trained"] == 8  # raised once


def trajectory(versions, mask=None, error=None):
    mask = mask or [1] * len(versions)
    oldest, mixed = min(versions), len(set(versions)) > 1
    return Trajectory([1], [2] * len(mask), mask, [0.0] * len(mask), "stop", 2, oldest, versions if mixed else (),
                      error=error)  # fmt: skip


def test_staleness_counts_from_the_oldest_generated_token():
    """Version 5 trains tokens of versions 3, 4, 4 (one of a tool), and 5, 5."""
    batch = [trajectory([3, 4, 4], [1, 0, 1]), trajectory([5, 5]), trajectory([1, 1], error="lost")]
    metrics = staleness_metrics(batch, 5, [2, 0])
    assert metrics == {
        "fully_async/count/current_param_version": 5.0,
        "training/off_policy/admission_staleness": 1.0,
        "training/off_policy/token_staleness/mean": np.mean([2, 1, 0, 0]),
        "training/off_policy/token_staleness/max": 2.0,
        "training/off_policy/trajectory_staleness": 1.0,
        "training/off_policy/trajectory_staleness_worst": 2.0,
        "fully_async/partial/total_partial_num": 1.0,
        "fully_async/partial/partial_ratio": 1 / 3,
        "fully_async/partial/max_partial_span": 1.0,
    }
    check_staleness(batch[:2], 5, 2)
    check_staleness([trajectory([NO_VERSION])], 5, 0)
    named = ("versions 3 to 4", "version 5 trains samples of 4 or later", "async_training.max_staleness=1")
    with raises("sync.stale-sample", *named, error=WeightSyncError):
        check_staleness(batch[:2], 5, 1)
    with raises("sync.stale-sample", "versions 5 to 5", "version 4"):
        check_staleness(batch[1:2], 4, 1)
