"""Cost of generation against steps, bytes and FLOPs computed by hand."""

from dataclasses import replace

import pytest
import torch
from planned_jobs import megatron, train_job

from megarl.models import parse_model_config
from megarl.ops.plan.flops import Lengths
from megarl.ops.plan.generation import (
    LENGTH_MULTIPLE,
    EngineModel,
    bytes_per_sequence,
    bytes_per_token,
    generation_cost,
)
from megarl.ops.plan.hardware import read_hardware
from megarl.rollout.embedded import engine
from megarl.rollout.embedded.kv_cache import KVCache

H100 = read_hardware("h100")


def job_of(name="Qwen2.5-7B", tp=1, estimator="grpo", **changes):
    """Return a job of 64 prompts with two samples each on eight devices."""
    sections = {f"actor_rollout_ref__rollout__{key}": value for key, value in changes.items()}
    sections["actor_rollout_ref__rollout__tensor_model_parallel_size"] = tp
    sections["algorithm__adv_estimator"] = estimator
    return train_job(name, megatron(2), devices=8, data__train_batch_size=64, **sections)


def model_of(job):
    return EngineModel(job.rollout, H100, 8, on_cpu=False)


def generate(job, response=1024, longest=1024, kv_tokens=None):
    return generation_cost(job, H100, Lengths(1024, response, longest, "test"), kv_tokens)


def test_a_single_sequence_reads_all_weights_per_token():
    """A token reads 7.6B bfloat16 weights, without the embedding, and the KV cache."""
    job = job_of(max_num_seqs=1)
    per_replica = job.rollout.samples // job.rollout.replicas
    step = generate(job).cost.memory / (per_replica * 1024)
    weights = (7.6156e9 - 152064 * 3584) * 2
    cache = (1024 + 512) * 2 * 4 * 128 * 28 * 2  # two of four heads of 128, in 28 layers
    assert step == pytest.approx((weights + cache) / 3352e9, rel=0.01)


def test_slots_cache_and_longest_response_determine_the_number_of_steps():
    """A memory-bound step with fewer sequences reads the same weights: 16 samples per replica take more steps."""
    job, weights = job_of(max_num_seqs=8), H100.reading_s(model_of(job_of()).shared_bytes)

    def steps(**options):
        cost, samples = generate(job, **options).cost, 16
        response = options.get("response", 1024)
        cached = samples * response * (1024 + response / 2) * model_of(job).kv_bytes
        return (cost.memory - H100.reading_s(cached)) / weights

    assert steps() == pytest.approx(2 * 1024)
    assert steps(kv_tokens=4 * 2048.0) == pytest.approx(4 * 1024), "the cache holds four at a time"
    assert steps(kv_tokens=1.0) == pytest.approx(16 * 1024), "one always runs"
    assert steps(response=100) == pytest.approx(1024), "one response may be the longest"
    assert steps(response=100, longest=100) == pytest.approx(200)


def test_tensor_parallelism_divides_reads_and_adds_collectives():
    single, split = (model_of(job_of(tp=tp)) for tp in (1, 2))
    assert split.shared_bytes == pytest.approx(single.shared_bytes / 2)
    one, two = (model.step(1, 1000) for model in (single, split))
    assert one.parallel == 0 < two.parallel
    assert one.total / 2 < two.total < one.total


def test_sglang_prefills_a_shared_prompt_once():
    job = job_of()
    separate = replace(job, rollout=replace(job.rollout, prompts=job.rollout.samples, samples_per_prompt=1))
    shared, own = (generate(each).flops for each in (job, separate))
    model = model_of(job)
    assert own - shared == pytest.approx(64 * (model.flops.linear * 1024 + model.attention * 1024**2))
    assert generate(job).cost.compute == pytest.approx(generate(separate).cost.compute / 2), "prefill alone computes"


def test_greedy_baselines_are_generated():
    """64 prompts of 1,024 tokens, with two samples and ReMax's greedy one each.

    A token of Qwen2.5-7B uses the weights of 28 layers and of the head, and 28 attention heads of size 128.
    """
    job = job_of(estimator="remax")
    assert job.rollout.samples == 192
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    products = 2 * (28 * layer + 152064 * 3584) * (64 + 192) * 1024
    attention = 28 * 2 * 3584 * (64 * 1024**2 + 192 * 1024 * (2 * 1024 + 1024))
    assert generate(job).flops == pytest.approx(products + attention, rel=1e-6)


def test_small_batches_read_few_experts():
    """A token uses 8 of 128 experts; a large batch reads nearly all."""
    model = model_of(job_of("Qwen3-30B-A3B"))
    assert model.expert_bytes == pytest.approx(48 * 128 * 3 * 2048 * 768 * 2)
    few = H100.reading_s(model.shared_bytes + model.expert_bytes * 8 / 128)
    assert model.step(1, 0).total == pytest.approx(few)
    assert model.step(256, 0).total > 8 * few


def test_large_batches_are_compute_bound_and_small_ones_memory_bound():
    model = model_of(job_of())
    small, large = model.step(1, 0), model.step(512, 0)
    assert small.compute == 0 < small.memory and large.memory == 0 < large.compute
    # 512 tokens of 7.07B weights, without the embedding, at 989 TFLOP/s
    assert large.compute == pytest.approx(2 * 7.0706e9 * 512 / 989e12, rel=0.01)


def test_the_cache_is_as_large_as_the_embedded_engines():
    """With gated delta nets in three of four layers: keys and values of one layer, and states of the others."""
    raw = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48,
           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 50,
           "max_position_embeddings": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
           "linear_key_head_dim": 8, "linear_value_head_dim": 6}  # fmt: skip
    model, slots, length = parse_model_config(raw), 3, 64
    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2)):
        cache = KVCache(model, slots, length, dtype, torch.device("cpu"))
        assert cache.delta is not None
        held = (*cache._keys, *cache._values, *cache.delta._inputs, *cache.delta._matrices)
        states = slots * bytes_per_sequence(model, 1, width)
        assert states + slots * length * bytes_per_token(model, 1, width) == sum(part.nbytes for part in held)
    assert bytes_per_sequence(model, 2, 2) * 2 == bytes_per_sequence(model, 1, 2)


def test_slots_are_rounded_as_in_the_embedded_engine():
    """The plan imports no torch, so it has a constant of its own."""
    assert LENGTH_MULTIPLE == engine.LENGTH_MULTIPLE
