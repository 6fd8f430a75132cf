"""Generation played through: steps and times by hand."""

from dataclasses import replace

import pytest
from planned_jobs import megatron, train_job

from megarl.plan.generation import Decoder, time_generation
from megarl.plan.hardware import read_hardware
from megarl.plan.lengths import Lengths, Quantiles, longest_lengths

H100 = read_hardware("h100")
ENDLESS = float("inf")


def rollout_of(name="Qwen2.5-7B", tp=1, estimator="grpo", **changes):
    sections = {f"actor_rollout_ref__rollout__{key}": value for key, value in changes.items()}
    sections["actor_rollout_ref__rollout__tensor_model_parallel_size"] = tp
    sections["algorithm__adv_estimator"] = estimator
    job = train_job(name, megatron(2), devices=8, data__train_batch_size=64, **sections)
    assert job.rollout is not None
    return job.rollout


def decoder_of(rollout):
    return Decoder(rollout, H100, 8, on_cpu=False)


def generate(rollout, lengths=None, room=ENDLESS):
    return time_generation(rollout, decoder_of(rollout), lengths or longest_lengths(1024, 1024), room)


def test_one_sequence_at_a_time_reads_the_weights_for_each_token():
    """A token takes the reading of 7.6B bfloat16 weights, the embedding aside, and of the cache."""
    rollout = rollout_of(max_num_seqs=1)
    made = generate(rollout)
    each = rollout.samples // rollout.replicas
    assert made.steps == each * 1024 and made.mean_running == 1
    step = made.decode_s / made.steps - H100.latency.decode_step_ms * 1e-3
    weights = (7.6156e9 - 152064 * 3584) * 2
    cache = (1024 + 512) * 2 * 4 * 128 * 28 * 2  # two of four heads of 128, in 28 layers
    assert step == pytest.approx((weights + cache) / (3352e9 * 0.85), rel=0.01)


def test_slots_and_room_make_waves():
    rollout = rollout_of(max_num_seqs=8)
    each = rollout.samples // rollout.replicas
    assert each == 16
    assert generate(rollout).steps == 2 * 1024
    assert generate(rollout, room=4 * 2048.0).steps == 4 * 1024, "four at a time have room"
    assert generate(rollout, room=1.0).steps == 16 * 1024, "one is always let in"


def test_a_slot_that_is_free_is_taken_at_once():
    """Half of the answers have 10 tokens, half 1,000: with two slots no step waits for a batch to end."""
    rollout = rollout_of(max_num_seqs=2)
    lengths = Lengths(Quantiles.constant(8), Quantiles((10, 1000)), "test")
    made = generate(rollout, lengths)
    total = 16 // 2 * (10 + 1000)
    assert total / 2 <= made.steps <= total / 2 + 1000
    assert made.steps * made.mean_running == pytest.approx(total)


def test_a_long_tail_is_slow_per_token():
    rollout = rollout_of(max_num_seqs=256)
    even = Lengths(Quantiles.constant(8), Quantiles.constant(200), "test")
    tail = Lengths(Quantiles.constant(8), Quantiles.log_normal(200, 1.2, 1024), "test")
    assert generate(rollout, tail).decode_s > 2 * generate(rollout, even).decode_s


def test_tensor_parallelism_divides_reading_and_adds_talking():
    one, two = (rollout_of(tp=tp) for tp in (1, 2))
    alone, shared = decoder_of(one), decoder_of(two)
    assert shared.shared_bytes == pytest.approx(alone.shared_bytes / 2)
    assert shared.step(1).seconds < alone.step(1).seconds and shared.step(1).seconds > alone.step(1).seconds / 2
    assert alone.reduce_s(1e6) == 0 < shared.reduce_s(1e6)


def test_samples_of_a_prompt_share_it_in_sglang():
    one = rollout_of()
    assert one.answers == 2
    alone = replace(one, prompts=one.samples, answers=1)
    # the wave's prompts are computed together, so attention and products are halved exactly
    assert generate(one).prefill_s == pytest.approx(generate(alone).prefill_s / 2, rel=0.01)


def test_greedy_baselines_are_generated_too():
    """64 prompts of 1,024 tokens, to each two answers and ReMax's greedy one of 1,024: 24 on each of eight replicas.

    Of Qwen2.5-7B a token meets the weights of 28 layers and of the head, and 28 heads of 128 attend.
    """
    rollout = rollout_of(estimator="remax")
    waves = rollout_of(estimator="remax", max_num_seqs=8)
    assert rollout.samples == 192
    assert generate(waves).steps == 3 * 1024, "eight at a time, three times"
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    products = 2 * (28 * layer + 152064 * 3584) * (64 + 192) * 1024
    attention = 28 * 2 * 3584 * (64 * 1024**2 + 192 * 1024 * (2 * 1024 + 1024))
    made = generate(rollout)
    assert made.time.work.total == pytest.approx(products + attention, rel=1e-6)
    assert made.mean_running == 24
    assert made.prefill_s == generate(rollout_of()).prefill_s, "a prompt is computed once for all of its answers"


def test_few_sequences_read_few_experts():
    """One token goes to 8 of 128 experts; many read nearly all."""
    decoder = decoder_of(rollout_of("Qwen3-30B-A3B"))
    assert decoder.expert_bytes == pytest.approx(48 * 128 * 3 * 2048 * 768 * 2)
    few = H100.reading_s(decoder.shared_bytes + decoder.expert_bytes * 8 / 128)
    assert decoder.step(1).seconds == pytest.approx(few + H100.latency.decode_step_ms * 1e-3)
    assert decoder.step(256).seconds > 8 * few


def test_many_sequences_are_limited_by_products_and_few_by_reading():
    decoder = decoder_of(rollout_of())
    assert decoder.step(1).compute == 0 < decoder.step(1).memory
    assert decoder.step(512).memory == 0 < decoder.step(512).compute
    # 512 tokens of 7.07B weights, the embedding aside, at 70 % of 989 TFLOP/s
    assert decoder.step(512).compute == pytest.approx(2 * 7.0706e9 * 512 / (989e12 * 0.7), rel=0.01)


def test_operations_are_those_that_are_computed():
    """A prompt counts once for its two samples; each answer's tokens attend to it."""
    rollout = rollout_of()
    work = generate(rollout).time.work.total
    cost = decoder_of(rollout).cost
    samples = rollout.samples
    tokens, pairs = samples * (512 + 1024), samples * (1024**2 / 2 + 1024 * (2 * 1024 + 1024))
    assert work == pytest.approx(cost.linear * tokens + cost.quadratic * pairs)
