"""Rollout workers: weights from the actor only, and answers as batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import ProcessPool
from role_processes import LAYOUTS, Role, actor_arguments, resting
from safetensors.torch import load_file
from tiny_policies import EOS, PAD, TEMPERATURE, Models, rows_of
from torch import Tensor

from megarl.cluster.split import collect, plan_split, split
from megarl.config import RolloutConfig
from megarl.data import DataProto
from megarl.errors import WeightSyncError
from megarl.megatron.offload import PARTS
from megarl.models import WeightMap, read_model_config
from megarl.rollout import SamplingParams
from megarl.sharding import ReshardPlan, RolloutLayout, ShardingManager, build_plan
from megarl.sharding.receiver import route_shipments
from megarl.workers.actor import ActorWorker
from megarl.workers.place import WorkerPlace
from megarl.workers.rollout import RolloutWorker, derive_seed
from megarl.workers.settings import RolloutSettings

SAMPLING = SamplingParams(max_new_tokens=9, temperature=TEMPERATURE)
REPLICAS = 2


def rollout_worker(path: Path, rank: int = 0, world_size: int = 1, **config: Any) -> RolloutWorker:
    settings = RolloutSettings(str(path), PAD, "cpu", RolloutConfig(dtype="float32", **config))
    worker = RolloutWorker(WorkerPlace(rank, world_size, "127.0.0.1", 0), settings=settings)
    worker.init_model()
    return worker


def prompts_of(batch: DataProto) -> DataProto:
    width = batch.tensors["prompts"].shape[1]
    return DataProto.from_dict(
        {
            "prompts": batch.tensors["prompts"],
            "attention_mask": batch.tensors["attention_mask"][:, :width],
            "sample_seed": torch.arange(len(batch)) * 1_000_003,
        }
    )


@pytest.fixture(scope="module")
def prompts(models: Models) -> DataProto:
    return prompts_of(models.batch)


@pytest.fixture(scope="module")
def worker(models: Models) -> RolloutWorker:
    """One replica with the weights of the folder."""
    worker = rollout_worker(models.policy_path)
    worker.engine.load_hf(str(models.policy_path))
    return worker


# ---- answers


def test_answers_are_rows_in_the_order_of_the_prompts(worker: RolloutWorker, prompts: DataProto) -> None:
    batch = worker.generate_sequences(prompts, 3, SAMPLING)
    assert set(batch.tensors) == {
        "prompts",
        "responses",
        "attention_mask",
        "response_mask",
        "rollout_log_probs",
    }
    assert len(batch) == 24
    rectangle, mask = prompts.tensors["prompts"], prompts.tensors["attention_mask"].bool()
    asked = [ids[real].tolist() for ids, real in zip(rectangle, mask, strict=True)]
    assert [row.prompt.tolist() for row in rows_of(batch)] == [ids for ids in asked for _ in range(3)]
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


def test_samples_of_a_prompt_differ_and_repeat(worker: RolloutWorker, prompts: DataProto) -> None:
    first, again = (worker.generate_sequences(prompts, 4, SAMPLING) for _ in range(2))
    assert torch.equal(first.tensors["responses"], again.tensors["responses"])
    texts = [tuple(row.response.tolist()) for row in rows_of(first)]
    assert len(set(texts)) > 24
    reseeded = prompts.with_columns({"sample_seed": prompts.tensors["sample_seed"] + 1}, {})
    other = worker.generate_sequences(reseeded, 4, SAMPLING)
    assert [tuple(row.response.tolist()) for row in rows_of(other)] != texts


@pytest.mark.parametrize("slots", [1, 5])
def test_what_is_drawn_does_not_depend_on_replicas_or_batching(
    models: Models, worker: RolloutWorker, prompts: DataProto, slots: int
) -> None:
    whole = worker.generate_sequences(prompts, 2, SAMPLING)
    replicas = [rollout_worker(models.policy_path, rank, 3, max_num_seqs=slots) for rank in range(3)]
    plan = plan_split([1] * len(prompts), 3)
    answers = []
    for replica, chunk in zip(replicas, split(prompts, plan), strict=True):
        replica.engine.load_hf(str(models.policy_path))
        answers.append(replica.generate_sequences(chunk, 2, SAMPLING))
    joined = collect(answers, plan)
    for ours, theirs in zip(rows_of(joined), rows_of(whole), strict=True):
        assert ours.prompt.tolist() == theirs.prompt.tolist()
        assert ours.response.tolist() == theirs.response.tolist()
        torch.testing.assert_close(
            ours.columns["rollout_log_probs"], theirs.columns["rollout_log_probs"], rtol=0, atol=1e-5
        )


def test_a_prompt_keeps_its_answers_elsewhere_in_a_batch(worker: RolloutWorker, prompts: DataProto) -> None:
    order = [5, 0, 7, 2, 1, 6, 3, 4]
    straight = rows_of(worker.generate_sequences(prompts, 1, SAMPLING))
    shuffled = rows_of(worker.generate_sequences(prompts[order], 1, SAMPLING))
    assert [row.response.tolist() for row in shuffled] == [straight[row].response.tolist() for row in order]


def test_more_samples_begin_with_the_same_ones(worker: RolloutWorker, prompts: DataProto) -> None:
    two, three = (rows_of(worker.generate_sequences(prompts, n, SAMPLING)) for n in (2, 3))
    assert [r.response.tolist() for r in two] == [three[i].response.tolist() for i in range(24) if i % 3 < 2]


def test_seeds_of_samples_are_distinct_and_in_range() -> None:
    # Sums of the two numbers would collide.
    seeds = {derive_seed(seed, sample) for seed in range(40) for sample in range(40)}
    assert len(seeds) == 1600 and all(0 <= seed < 2**63 for seed in seeds)


# ---- weights


class Replicas:
    """The rollout workers of this process, and an actor in others, as the two ends of a sync."""

    def __init__(self, actor: Role, path: Path, plan: ReshardPlan, transport: str) -> None:
        self.actor = actor
        self.workers = [rollout_worker(path, rank, REPLICAS) for rank in range(REPLICAS)]
        actor.call("connect_sync", plan, transport, True, "float32")
        for worker in self.workers:
            worker.connect_sync(plan, transport, True)
        self.broken_at: int | None = None

    def export_bucket(self, index: int) -> Done:
        return Done(route_shipments(self.actor.call("export_bucket", index)))

    def release_bucket(self, index: int) -> None:
        self.actor.call("release_bucket", index)

    def begin_update(self, version: int) -> Done:
        return Done([worker.begin_update(version) for worker in self.workers])

    def import_bucket(self, index: int, exported: Done) -> Done:
        if index == self.broken_at:
            raise ConnectionError("the wire is cut")
        shipments = exported.result()
        return Done([worker.import_bucket(index, shipments.get(worker.rank, [])) for worker in self.workers])

    def end_update(self, version: int) -> Done:
        return Done([worker.end_update(version) for worker in self.workers])


class Done:
    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self) -> Any:
        return self.value


def reshard_plan(path: Path, layout: str, bucket_bytes: int = 5000) -> ReshardPlan:
    return build_plan(
        WeightMap(read_model_config(path)), LAYOUTS[layout], RolloutLayout(replicas=REPLICAS), bucket_bytes, 4
    )


def fused(folder: Path) -> dict[str, Tensor]:
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
def learned(role_pool: ProcessPool, models: Models, request: pytest.FixtureRequest) -> Iterator[tuple[str, Role]]:
    """An actor that has moved away from the folder's weights; under ``dp2`` it rests between phases."""
    layout = LAYOUTS[request.param]
    arguments = actor_arguments(models.policy_path, layout)
    with Role(role_pool, ActorWorker, layout, resting(arguments) if layout.dp > 1 else arguments) as actor:
        actor.update("update_actor", models.batch)
        yield request.param, actor


@pytest.mark.parametrize(
    ("learned", "transport"),
    [("tp2", "shared_memory"), ("tp2", "inline"), ("pp2", "shared_memory"), ("dp2", "inline")],
    indirect=["learned"],
)
def test_replicas_have_the_actors_weights_to_the_last_bit(
    learned: tuple[str, Role], models: Models, tmp_path: Path, transport: str
) -> None:
    layout, actor = learned
    plan = reshard_plan(models.policy_path, layout)
    assert len(plan.buckets) > 3
    ends = Replicas(actor, models.policy_path, plan, transport)
    manager = ShardingManager(plan, ends, ends)
    for version in (1, 2):
        metrics = manager.sync_weights()
        assert actor.parts_away() == (PARTS if layout == "dp2" else ())
        assert metrics["weight_sync/buckets"] == len(plan.buckets)
        assert [worker.weight_version() for worker in ends.workers] == [version, version]
        actor.call("export_hf", str(tmp_path / "hf"))
        expected = fused(tmp_path / "hf")
        for worker in ends.workers:
            weights = worker.engine.weights()
            assert set(weights) == set(expected)
            assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        assert metrics["weight_sync/bytes"] == REPLICAS * 4 * sum(tensor.numel() for tensor in expected.values())
        if version == 1:
            before = {name: tensor.clone() for name, tensor in weights.items()}
            actor.update("update_actor", models.batch)
        else:
            assert not torch.equal(before["lm_head.weight"], weights["lm_head.weight"])
    assert ends.workers[0].checksum() == ends.workers[1].checksum()


@pytest.mark.parametrize("learned", ["tp2", "pp2", "dp2"], indirect=True)
def test_log_probs_of_answers_are_the_actors(learned: tuple[str, Role], models: Models, prompts: DataProto) -> None:
    layout, actor = learned
    plan = reshard_plan(models.policy_path, layout)
    ends = Replicas(actor, models.policy_path, plan, "inline")
    ShardingManager(plan, ends, ends).sync_weights()
    batch = ends.workers[1].generate_sequences(prompts, 2, SAMPLING)
    ours = actor.map("compute_log_prob", batch).tensors["old_log_probs"]
    difference = ours - batch.tensors["rollout_log_probs"]
    assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("learned", ["tp2"], indirect=True)
def test_an_interrupted_sync_serves_nothing_until_a_whole_one(
    learned: tuple[str, Role], models: Models, prompts: DataProto
) -> None:
    layout, actor = learned
    plan = reshard_plan(models.policy_path, layout)
    ends = Replicas(actor, models.policy_path, plan, "shared_memory")
    manager = ShardingManager(plan, ends, ends)
    with pytest.raises(WeightSyncError, match="serves nothing"):
        ends.workers[0].generate_sequences(prompts, 1, SAMPLING)  # before the first sync
    manager.sync_weights()
    answers = ends.workers[0].generate_sequences(prompts, 1, SAMPLING)
    ends.broken_at = 2
    with pytest.raises(WeightSyncError, match=r"version 2 failed at bucket 3 of .*the wire is cut"):
        manager.sync_weights()
    for worker in ends.workers:
        assert worker.weight_version() == -1
        with pytest.raises(WeightSyncError, match="serves nothing"):
            worker.generate_sequences(prompts, 1, SAMPLING)
        with pytest.raises(WeightSyncError, match=f"received 2 of {len(plan.buckets)} weight buckets"):
            worker.end_update(2)
        with pytest.raises(WeightSyncError, match="serves nothing"):
            worker.generate_sequences(prompts, 1, SAMPLING)
    ends.broken_at = None
    manager.sync_weights()
    assert [worker.weight_version() for worker in ends.workers] == [2, 2]
    again = ends.workers[0].generate_sequences(prompts, 1, SAMPLING)
    assert torch.equal(again.tensors["responses"], answers.tensors["responses"])


@pytest.mark.parametrize("learned", ["tp2"], indirect=True)
def test_verification_sees_a_wrong_weight(learned: tuple[str, Role], models: Models) -> None:
    layout, actor = learned
    plan = reshard_plan(models.policy_path, layout, 1 << 20)
    ends = Replicas(actor, models.policy_path, plan, "inline")
    ends.begin_update(1)
    exported = ends.export_bucket(0)
    for shipment in exported.value[1]:
        shipment.payload.data[0] ^= 1
    with pytest.raises(WeightSyncError, match="rollout rank 1 differs from"):
        ends.import_bucket(0, exported)
