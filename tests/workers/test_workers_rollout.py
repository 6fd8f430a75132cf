"""Rollout workers: weights from the actor only, and responses in batches."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from role_processes import LAYOUTS, Role, actor_arguments, with_offload
from safetensors.torch import load_file
from support.engine_replica import EngineReplica
from support.expected_errors import raises
from support.local_group import LocalGroup
from tiny_policies import EOS, PAD, TEMPERATURE, rows_of

from megarl.agents.loop import SingleTurnLoop
from megarl.agents.runner import lead_conversation
from megarl.agents.trajectories import trajectories_to_batch
from megarl.agents.types import Conversation
from megarl.base.seeds import derive_seed
from megarl.cluster.sharding_manager import ShardingManager, SyncOptions
from megarl.config import RolloutConfig
from megarl.data import DataProto
from megarl.megatron.engine.offload import PARTS
from megarl.models import WeightMap, read_model_config
from megarl.rollout import Request, SamplingParams
from megarl.rollout.embedded.generation import ContinuousBatcher
from megarl.rollout.router import Router
from megarl.sharding.placement import RolloutLayout, Routes
from megarl.sharding.plan import build_plan, replica_plans
from megarl.workers.actor import ActorWorker
from megarl.workers.dispatch import WorkerPlace
from megarl.workers.rollout import RolloutWorker
from megarl.workers.settings import RolloutSettings

SAMPLING = SamplingParams(max_new_tokens=9, temperature=TEMPERATURE)
REPLICAS = 2


def rollout_worker(path, rank=0, world_size=1, **config):
    settings = RolloutSettings(str(path), "cpu", RolloutConfig(dtype="float32", **config))
    worker = RolloutWorker(WorkerPlace(rank, world_size, "127.0.0.1", 0), settings=settings)
    worker.init_model()
    return worker


def answers(workers, prompts, samples, capacity=99):
    """Responses that a router gets from these replicas."""
    rectangle, mask = prompts.tensors["prompts"], prompts.tensors["attention_mask"].bool()
    ids = [row[real].tolist() for row, real in zip(rectangle, mask, strict=True)]
    seeds = prompts.tensors["sample_seed"].tolist()
    conversations = [
        Conversation((), SAMPLING, prompt, derive_seed(seed, sample), str(row))
        for row, (prompt, seed) in enumerate(zip(ids, seeds, strict=True))
        for sample in range(samples)
    ]

    async def lead():
        async with Router(
            dict(enumerate(EngineReplica(worker.engine) for worker in workers)), capacity, 60.0
        ) as router:
            loop = SingleTurnLoop()
            return await asyncio.gather(*(lead_conversation(talk, loop, router.generate) for talk in conversations))

    return trajectories_to_batch(asyncio.run(lead()), PAD)


def prompts_of(batch):
    width = batch.tensors["prompts"].shape[1]
    return DataProto.from_dict(
        {
            "prompts": batch.tensors["prompts"],
            "attention_mask": batch.tensors["attention_mask"][:, :width],
            "sample_seed": torch.arange(len(batch)) * 1_000_003,
        }
    )


@pytest.fixture(scope="module")
def prompts(models):
    return prompts_of(models.batch)


@pytest.fixture(scope="module")
def worker(models):
    """One replica with the weights of the folder."""
    worker = rollout_worker(models.policy_path)
    worker.engine.load_hf(str(models.policy_path))
    return worker


# ---- answers


def test_responses_are_in_the_order_of_the_prompts(worker, prompts):
    batch = answers([worker], prompts, 3)
    assert set(batch.tensors) == {
        "prompts",
        "responses",
        "attention_mask",
        "response_mask",
        "generated_mask",
        "rollout_log_probs",
        "prompt_digests",
    }
    assert len(batch) == 24
    rectangle, mask = prompts.tensors["prompts"], prompts.tensors["attention_mask"].bool()
    sent_prompts = [ids[real].tolist() for ids, real in zip(rectangle, mask, strict=True)]
    assert [row.prompt.tolist() for row in rows_of(batch)] == [ids for ids in sent_prompts for _ in range(3)]
    lengths = set()
    for index, row in enumerate(rows_of(batch)):
        ids, size = row.response.tolist(), len(row.response)
        lengths.add(size)
        assert EOS not in ids[:-1] and (size == 9 or ids[-1] == EOS)
        assert batch.tensors["response_mask"][index].tolist() == [1] * size + [0] * (
            batch.tensors["responses"].shape[1] - size
        )
        assert (batch.tensors["responses"][index, size:] == PAD).all()
        assert not batch.tensors["rollout_log_probs"][index, size:].any()
        assert (batch.tensors["rollout_log_probs"][index, :size] < 0).all()
    assert len(lengths) > 2, "answers that stop early and answers that do not"


def test_samples_of_a_prompt_differ_and_are_reproducible(worker, prompts):
    first, again = (answers([worker], prompts, 4) for _ in range(2))
    assert torch.equal(first.tensors["responses"], again.tensors["responses"])
    texts = [tuple(row.response.tolist()) for row in rows_of(first)]
    assert len(set(texts)) > 24
    reseeded = prompts.with_columns({"sample_seed": prompts.tensors["sample_seed"] + 1}, {})
    other = answers([worker], reseeded, 4)
    assert [tuple(row.response.tolist()) for row in rows_of(other)] != texts


@pytest.mark.parametrize("slots", [1, 5])
def test_samples_do_not_depend_on_replicas_or_batching(models, worker, prompts, slots):
    whole = answers([worker], prompts, 2)
    replicas = [rollout_worker(models.policy_path, rank, 3, max_num_seqs=slots) for rank in range(3)]
    for replica in replicas:
        replica.engine.load_hf(str(models.policy_path))
    joined = answers(replicas, prompts, 2, capacity=3)
    for ours, theirs in zip(rows_of(joined), rows_of(whole), strict=True):
        assert ours.prompt.tolist() == theirs.prompt.tolist()
        assert ours.response.tolist() == theirs.response.tolist()
        torch.testing.assert_close(
            ours.columns["rollout_log_probs"], theirs.columns["rollout_log_probs"], rtol=0, atol=1e-5
        )


def test_samples_do_not_depend_on_the_position_in_the_batch(worker, prompts):
    order = [5, 0, 7, 2, 1, 6, 3, 4]
    straight = rows_of(answers([worker], prompts, 1))
    shuffled = rows_of(answers([worker], prompts[order], 1))
    assert [row.response.tolist() for row in shuffled] == [straight[row].response.tolist() for row in order]


def test_larger_n_extends_the_same_samples(worker, prompts):
    two, three = (rows_of(answers([worker], prompts, n)) for n in (2, 3))
    assert [r.response.tolist() for r in two] == [three[i].response.tolist() for i in range(24) if i % 3 < 2]


def test_seeds_of_samples_are_distinct_and_in_range():
    # Sums of the two numbers would collide.
    seeds = {derive_seed(seed, sample) for seed in range(40) for sample in range(40)}
    assert len(seeds) == 1600 and all(0 <= seed < 2**63 for seed in seeds)


# ---- weights


class ActorGroup:
    """An actor in other processes, called as a worker group; its verbs run concurrently with those of the replicas."""

    def __init__(self, actor):
        self.actor, self.thread, self.ranks = actor, ThreadPoolExecutor(1), list(range(actor.layout.world_size))

    def submit_on(self, ranks, verb, *arguments, after_failure=False):
        assert list(ranks) == self.ranks
        return self.thread.submit(self.actor.call, verb, *arguments)

    def submit_scatter(self, verb, receivers, width, *arguments):
        return self.submit_on(self.ranks, verb, *arguments)


def connected(actor, path, plan, transport, **options):
    replicas = LocalGroup("rollout", [rollout_worker(path, rank, REPLICAS) for rank in range(REPLICAS)])
    places = [place for worker in replicas.workers for place in worker.sync_places()]
    routes = Routes(actor.call("sync_place"), places, transport)
    address = actor.call("host_sync")[0] if routes.needs_rendezvous() else None
    actor.call("connect_sync", plan, routes, address, "float32")
    for worker, parts in zip(replicas.workers, replica_plans(plan), strict=True):
        worker.connect_sync(parts, routes, address, "float32")
    options = {"verify_freq": 1, **options}
    return ShardingManager(plan, ActorGroup(actor), replicas, SyncOptions(**options)), replicas


def reshard_plan(path, layout, bucket_bytes=5000, wave_replicas=None):
    weight_map, rollout = WeightMap(read_model_config(path)), RolloutLayout(replicas=REPLICAS)
    return build_plan(weight_map, LAYOUTS[layout], rollout, bucket_bytes, 4, wave_replicas=wave_replicas)


def fused(folder):
    """The engine's parameters from a Hugging Face folder, fused by hand."""
    (file,) = folder.glob("*.safetensors")
    tensors, result = load_file(file), {}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for target, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            room = target.split(".")[0]
            for kind in ("weight", "bias"):
                names = [f"{prefix}{room}.{part}_proj.{kind}" for part in parts]
                if names[0] in tensors:
                    result[f"{prefix}{target}.{kind}"] = torch.cat([tensors.pop(name) for name in names])
    return {**tensors, **result}


@pytest.fixture(scope="module")
def learned(role_pool, models, request):
    """A trained actor whose weights differ from the folder's; under ``dp2`` it offloads between phases."""
    layout = LAYOUTS[request.param]
    arguments = actor_arguments(models.policy_path, layout)
    with Role(role_pool, ActorWorker, layout, with_offload(arguments) if layout.dp > 1 else arguments) as actor:
        actor.update("update_actor", models.batch)
        yield request.param, actor


@pytest.mark.parametrize(
    ("learned", "transport"),
    [("tp2", "auto"), ("tp2", "inline"), ("tp2", "gloo"), ("pp2", "auto"), ("pp2", "gloo"), ("dp2", "inline")],
    indirect=["learned"],
)
def test_replica_weights_equal_the_actors_bit_for_bit(learned, models, tmp_path, transport):
    layout, actor = learned
    plan = reshard_plan(models.policy_path, layout)
    assert len(plan.buckets) > 3
    manager, ends = connected(actor, models.policy_path, plan, transport)
    for version in (1, 2):
        metrics = manager.sync_weights()
        assert actor.offloaded_parts() == (PARTS if layout == "dp2" else ())
        assert metrics["weight_sync/buckets"] == len(plan.buckets)
        assert [worker.weight_version() for worker in ends.workers] == [version, version]
        actor.call("export_hf", str(tmp_path / "hf"))
        expected = fused(tmp_path / "hf")
        for worker in ends.workers:
            weights = worker.engine._weights.tensors
            assert set(weights) == set(expected)
            assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        assert metrics["weight_sync/bytes"] == REPLICAS * 4 * sum(tensor.numel() for tensor in expected.values())
        if version == 1:
            before = {name: tensor.clone() for name, tensor in weights.items()}
            actor.update("update_actor", models.batch)
        else:
            assert not torch.equal(before["lm_head.weight"], weights["lm_head.weight"])
    assert ends.workers[0].checksums() == ends.workers[1].checksums()


@pytest.mark.parametrize("learned", ["tp2", "pp2", "dp2"], indirect=True)
def test_rollout_log_probs_equal_the_actors(learned, models, prompts):
    layout, actor = learned
    plan = reshard_plan(models.policy_path, layout)
    manager, ends = connected(actor, models.policy_path, plan, "inline")
    manager.sync_weights()
    batch = answers([ends.workers[1]], prompts, 2)
    ours = actor.map("compute_log_prob", batch).tensors["old_log_probs"]
    difference = ours - batch.tensors["rollout_log_probs"]
    assert difference.abs().max() < 1e-5


@pytest.mark.parametrize(("learned", "transport"), [("tp2", "shared_memory"), ("tp2", "gloo")], indirect=["learned"])
def test_engine_stays_stale_after_an_interrupted_sync(learned, models, prompts, transport):
    layout, actor = learned
    plan = reshard_plan(models.policy_path, layout)
    manager, ends = connected(actor, models.policy_path, plan, transport)
    with raises("engine.stale-weights"):
        answers([ends.workers[0]], prompts, 1)  # before the first sync
    manager.sync_weights()
    first = answers([ends.workers[0]], prompts, 1)
    ends.fail_at = ("import_bucket", 2)
    with raises("sync.failed", "version 2 failed at bucket 3 of ", "lost rank"):
        manager.sync_weights()
    assert ends.submit_on(ends.ranks, "weight_version").result() == [-1, -1]  # after what was under way
    for worker in ends.workers:
        assert worker.weight_version() == -1
        with raises("engine.stale-weights"):
            answers([worker], prompts, 1)
        with raises("sync.incomplete", f"0 of {len(plan.buckets)} weight buckets"):
            worker.end_update(2)
        with raises("engine.stale-weights"):
            answers([worker], prompts, 1)
    ends.fail_at = None
    manager.sync_weights()
    assert [worker.weight_version() for worker in ends.workers] == [2, 2]
    again = answers([ends.workers[0]], prompts, 1)
    assert torch.equal(again.tensors["responses"], first.tensors["responses"])


@pytest.mark.parametrize(("learned", "transport"), [("tp2", "auto"), ("pp2", "gloo")], indirect=["learned"])
def test_a_replica_generates_while_another_one_receives_the_weights(learned, models, transport, monkeypatch):
    """Each replica answers a request within the wave of the other, and continues its own response after its wave."""
    layout, actor = learned
    plan = reshard_plan(models.policy_path, layout, wave_replicas=1)
    manager, ends = connected(actor, models.policy_path, plan, transport)
    manager.sync_weights()
    long = SamplingParams(max_new_tokens=60, temperature=TEMPERATURE, ignore_eos=True)
    short = replace(long, max_new_tokens=3)

    def answer(worker, name, params):
        worker.accept(name, [Request(name, [5, 6, 7], params, seed=1)], ())
        while not (ended := worker.completions(name, 1.0)):
            pass
        return ended[0]

    # Slow steps, so that the response is in flight at the sync of either replica, however late that is.
    advance, advances, synced = ContinuousBatcher.advance, Counter[int](), threading.Event()

    def advance_slowly(batch):
        advances[id(batch)] += 1
        synced.wait(0.01 if advances[id(batch)] < 40 else 1.0)
        return advance(batch)

    monkeypatch.setattr(ContinuousBatcher, "advance", advance_slowly)
    versions: dict[int, set[int]] = {}
    for rank, worker in enumerate(ends.workers):
        other, first = ends.workers[1 - rank], plan.imported_by(rank).start
        write = worker.import_bucket

        def ask_the_other(index, messages, rank=rank, other=other, first=first, write=write):
            if index == first:
                versions[rank] = set(answer(other, f"during wave {rank}", short).versions)
            write(index, messages)

        worker.import_bucket = ask_the_other
        worker.accept("long", [Request("long", [1, 2, 3], long, seed=rank)], ())
    metrics, paused = manager.sync_weights_in_flight()
    synced.set()
    assert versions == {0: {1}, 1: {2}}
    assert metrics["weight_sync/verified"] == 1 and len(paused) == 2
    for worker in ends.workers:
        while not (ended := worker.completions("long", 1.0)):
            pass
        assert set(ended[0].versions) <= {1, 2} and 2 in ended[0].versions


@pytest.mark.parametrize("learned", ["tp2"], indirect=True)
def test_verification_detects_a_wrong_weight(learned, models):
    layout, actor = learned
    manager, ends = connected(actor, models.policy_path, reshard_plan(models.policy_path, layout), "auto")
    weights = ends.workers[1].engine._weights
    write = weights.write

    def write_wrong(slices):
        write([(name, at, values + 1 if name == "model.norm.weight" else values) for name, at, values in slices])

    weights.write = write_wrong
    with raises("sync.failed", "'model.norm.weight' of rollout replica 1 (rank 1)"):
        manager.sync_weights()
    assert [worker.weight_version() for worker in ends.workers] == [-1, -1]


@pytest.mark.parametrize("learned", ["tp2"], indirect=True)
def test_weight_change_after_verification_is_detected(learned, models, monkeypatch):
    layout, actor = learned
    manager, ends = connected(actor, models.policy_path, reshard_plan(models.policy_path, layout), "auto")
    engine = ends.workers[1].engine
    end = engine.receiver.end

    def damage():
        engine._weights.tensors["model.norm.weight"][3] *= 1.001

    monkeypatch.setattr(engine.receiver, "end", lambda version: (end(version), damage()))
    with raises("sync.failed", "failed at end_update", "rank 0 were"):
        manager.sync_weights()
    monkeypatch.undo()
    manager.sync_weights()
    damage()
    with raises("sync.failed", "version 2 failed at begin_update", "while it served them"):
        manager.sync_weights()
    assert ends.submit_on(ends.ranks, "weight_version").result() == [-1, -1]
    manager.sync_weights()
    assert [worker.weight_version() for worker in ends.workers] == [2, 2]


@pytest.mark.parametrize("learned", ["dp2"], indirect=True)
def test_actor_and_engine_alternate_on_a_shared_device(learned, models, prompts, monkeypatch):
    layout, actor = learned
    plan = reshard_plan(models.policy_path, layout)
    manager, ends = connected(actor, models.policy_path, plan, "auto", free_engine=True)
    engine, seen = ends.workers[0].engine, []

    def note(owner, name):
        method = getattr(owner, name)

        def noted(*arguments):
            method(*arguments)
            # Only this process's replica may ask: a bucket's verb holds the actor's processes.
            seen.append(
                (name, actor.offloaded_parts() if name == "wake" else None, tuple(sorted(engine.asleep)), engine.stale)
            )

        monkeypatch.setattr(owner, name, noted)

    for owner, name in ((engine, "wake"), (engine.receiver, "begin"), (engine.receiver, "end"), (engine, "sleep")):
        note(owner, name)
    for version in (1, 2):
        seen.clear()
        manager.sync_weights()
        assert answers([ends.workers[0]], prompts, 1) is not None
        manager.free_engines()
        with raises("engine.stale-weights"):
            answers([ends.workers[0]], prompts, 1)
        actor.update("update_actor", models.batch)  # the trainer comes back by itself
        asleep = () if version == 1 else ("kv_cache",)
        assert seen == [
            ("wake", PARTS, asleep, True),
            ("begin", None, asleep, True),
            ("wake", PARTS, (), True),
            ("end", None, (), False),
            ("sleep", None, ("kv_cache", "weights"), True),
        ]
