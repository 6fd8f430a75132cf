"""Generation simulation against steps and times computed by hand."""

from dataclasses import replace

import pytest
import torch
from planned_jobs import megatron, train_job

from megarl.models import parse_model_config
from megarl.ops.plan.generation import (
    LENGTH_MULTIPLE,
    EngineTimer,
    bytes_per_sequence,
    bytes_per_token,
    time_generation,
)
from megarl.ops.plan.hardware import read_hardware
from megarl.ops.plan.lengths import Lengths, Quantiles, longest_lengths
from megarl.rollout.embedded import engine
from megarl.rollout.embedded.kv_cache import KVCache

H100 = read_hardware("h100")
UNLIMITED = float("inf")


def rollout_of(name="Qwen2.5-7B", tp=1, estimator="grpo", **changes):
    sections = {f"actor_rollout_ref__rollout__{key}": value for key, value in changes.items()}
    sections["actor_rollout_ref__rollout__tensor_model_parallel_size"] = tp
    sections["algorithm__adv_estimator"] = estimator
    job = train_job(name, megatron(2), devices=8, data__train_batch_size=64, **sections)
    assert job.rollout is not None
    return job.rollout


def timer_of(rollout):
    return EngineTimer(rollout, H100, 8, on_cpu=False)


def generate(rollout, lengths=None, kv_tokens=UNLIMITED):
    return time_generation(rollout, timer_of(rollout), lengths or longest_lengths(1024, 1024), kv_tokens)


def test_a_single_sequence_reads_all_weights_per_token():
    """A token reads 7.6B bfloat16 weights, without the embedding, and the KV cache."""
    rollout = rollout_of(max_num_seqs=1)
    generated = generate(rollout)
    per_replica = rollout.samples // rollout.replicas
    assert generated.steps == per_replica * 1024 and generated.mean_running == 1
    step = generated.decode_s / generated.steps - H100.latency.decode_step_ms * 1e-3
    weights = (7.6156e9 - 152064 * 3584) * 2
    cache = (1024 + 512) * 2 * 4 * 128 * 28 * 2  # two of four heads of 128, in 28 layers
    assert step == pytest.approx((weights + cache) / (3352e9 * 0.85), rel=0.01)


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


def test_slots_and_cache_capacity_limit_running_sequences():
    rollout = rollout_of(max_num_seqs=8)
    per_replica = rollout.samples // rollout.replicas
    assert per_replica == 16
    assert generate(rollout).steps == 2 * 1024
    assert generate(rollout, kv_tokens=4 * 2048.0).steps == 4 * 1024, "the cache fits four at a time"
    assert generate(rollout, kv_tokens=1.0).steps == 16 * 1024, "one is always admitted"


def test_a_free_slot_is_refilled_at_once():
    """Half of the responses have 10 tokens, half 1,000: with two slots, no step waits for the end of a batch."""
    rollout = rollout_of(max_num_seqs=2)
    lengths = Lengths(Quantiles.constant(8), Quantiles((10, 1000)), "test")
    generated = generate(rollout, lengths)
    total = 16 // 2 * (10 + 1000)
    assert total / 2 <= generated.steps <= total / 2 + 1000
    assert generated.steps * generated.mean_running == pytest.approx(total)


def test_a_long_tail_is_slower_per_token():
    rollout = rollout_of(max_num_seqs=256)
    even = Lengths(Quantiles.constant(8), Quantiles.constant(200), "test")
    tail = Lengths(Quantiles.constant(8), Quantiles.log_normal(200, 1.2, 1024), "test")
    assert generate(rollout, tail).decode_s > 2 * generate(rollout, even).decode_s


def test_tensor_parallelism_divides_reads_and_adds_collectives():
    tp1, tp2 = (rollout_of(tp=tp) for tp in (1, 2))
    single, split = timer_of(tp1), timer_of(tp2)
    assert split.shared_bytes == pytest.approx(single.shared_bytes / 2)
    assert split.step(1).seconds < single.step(1).seconds and split.step(1).seconds > single.step(1).seconds / 2
    assert single.reduce_s(1e6) == 0 < split.reduce_s(1e6)


def test_sglang_prefills_a_shared_prompt_once():
    rollout = rollout_of()
    assert rollout.samples_per_prompt == 2
    separate = replace(rollout, prompts=rollout.samples, samples_per_prompt=1)
    # the prompts of a wave are computed together, so attention and products are halved exactly
    assert generate(rollout).prefill_s == pytest.approx(generate(separate).prefill_s / 2, rel=0.01)


def test_greedy_baselines_are_generated():
    """64 prompts of 1,024 tokens, with two samples and ReMax's greedy one each: 24 on each of eight replicas.

    A token of Qwen2.5-7B uses the weights of 28 layers and of the head, and 28 attention heads of size 128.
    """
    rollout = rollout_of(estimator="remax")
    waves = rollout_of(estimator="remax", max_num_seqs=8)
    assert rollout.samples == 192
    assert generate(waves).steps == 3 * 1024, "eight at a time, three times"
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    products = 2 * (28 * layer + 152064 * 3584) * (64 + 192) * 1024
    attention = 28 * 2 * 3584 * (64 * 1024**2 + 192 * 1024 * (2 * 1024 + 1024))
    generated = generate(rollout)
    assert generated.time.flops.total == pytest.approx(products + attention, rel=1e-6)
    assert generated.mean_running == 24
    assert generated.prefill_s == generate(rollout_of()).prefill_s, "a prompt is computed once for all of its samples"


def test_small_batches_read_few_experts():
    """A token uses 8 of 128 experts; a large batch reads nearly all."""
    timer = timer_of(rollout_of("Qwen3-30B-A3B"))
    assert timer.expert_bytes == pytest.approx(48 * 128 * 3 * 2048 * 768 * 2)
    few = H100.reading_s(timer.shared_bytes + timer.expert_bytes * 8 / 128)
    assert timer.step(1).seconds == pytest.approx(few + H100.latency.decode_step_ms * 1e-3)
    assert timer.step(256).seconds > 8 * few


def test_large_batches_are_compute_bound_and_small_ones_memory_bound():
    timer = timer_of(rollout_of())
    assert timer.step(1).compute == 0 < timer.step(1).memory
    assert timer.step(512).memory == 0 < timer.step(512).compute
    # 512 tokens of 7.07B weights, without the embedding, at 70 % of 989 TFLOP/s
    assert timer.step(512).compute == pytest.approx(2 * 7.0706e9 * 512 / (989e12 * 0.7), rel=0.01)


def test_generation_flops_count_a_shared_prompt_once():
    """A prompt counts once for its two samples; the tokens of each response attend to it."""
    rollout = rollout_of()
    work = generate(rollout).time.flops.total
    cost = timer_of(rollout).cost
    samples = rollout.samples
    tokens, pairs = samples * (512 + 1024), samples * (1024**2 / 2 + 1024 * (2 * 1024 + 1024))
    assert work == pytest.approx(cost.linear * tokens + cost.quadratic * pairs)


def test_slots_are_rounded_as_in_the_embedded_engine() -> None:
    """The plan imports no torch, so it has a constant of its own."""
    assert LENGTH_MULTIPLE == engine.LENGTH_MULTIPLE
