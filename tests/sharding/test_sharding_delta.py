"""Delta encoding of weight messages: exact, small, and full again after a failure."""

import numpy as np
import pytest
import torch
from expected_errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import plan_cases
from resharding_cases import weight_map_of
from sync_in_process import Setup, two_nodes
from transformers import LlamaConfig, LlamaForCausalLM

from megarl.models import ParallelLayout
from megarl.sharding.delta import MAX_DISTANCE, DeltaDecoder, DeltaEncoder

KEY = (3, 0)


def send(encoder, decoder, message, word_bytes=2):
    """Encode and decode a message; return the number of sent bytes."""
    encoding, sent = encoder.encode(KEY, message.clone(), word_bytes)
    assert torch.equal(decoder.decode(KEY, sent, encoding), message)
    return len(sent)


@given(st.data())
def test_every_message_arrives_bit_for_bit(data):
    """Bytes change at random."""
    seed, words = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(1, 3000))
    word_bytes = data.draw(st.sampled_from([2, 4]))
    random = np.random.default_rng(seed)
    message = random.integers(0, 256, words * word_bytes, dtype=np.uint8)
    encoder, decoder = DeltaEncoder(data.draw(st.integers(0, 3))), DeltaDecoder()
    for share in data.draw(st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=1, max_size=5)):
        changed = random.random(len(message)) < share
        message[changed] = random.integers(0, 256, changed.sum(), dtype=np.uint8)
        assert send(encoder, decoder, torch.from_numpy(message), word_bytes) <= len(message)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sent_bytes_are_those_of_the_changed_words(dtype):
    words = 200_000
    weights = torch.randn(words).to(dtype)
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    assert send(encoder, decoder, weights.view(torch.uint8), dtype.itemsize) == words * dtype.itemsize
    changed = torch.arange(5, words, 100)
    weights[changed] += 1
    # Distances need a word at least every MAX_DISTANCE words.
    expected = (len(changed) + len(range(0, words, MAX_DISTANCE))) * (dtype.itemsize + 2)
    assert send(encoder, decoder, weights.view(torch.uint8), dtype.itemsize) == expected


def test_not_a_number_and_signed_zero_are_compared_by_their_bits():
    weights = torch.tensor([float("nan"), 0.0] * 100)
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    send(encoder, decoder, weights.view(torch.uint8), 4)
    assert send(encoder, decoder, weights.view(torch.uint8), 4) == 6  # the first word only
    weights[1] = -0.0
    assert send(encoder, decoder, weights.view(torch.uint8), 4) == 12


def test_full_messages_at_the_configured_frequency():
    message, encoder, decoder = torch.zeros(1000, dtype=torch.uint8), DeltaEncoder(3), DeltaDecoder()
    assert [send(encoder, decoder, message) == 1000 for _ in range(7)] == [True, False, False] * 2 + [True]


def test_a_message_that_has_changed_everywhere_is_sent_in_full():
    message, encoder, decoder = torch.zeros(1000, dtype=torch.uint8), DeltaEncoder(), DeltaDecoder()
    send(encoder, decoder, message)
    assert send(encoder, decoder, message + 1) == 1000
    assert send(encoder, decoder, message + 1) == 4


def test_a_delta_needs_the_message_before_it():
    message, encoder, decoder = torch.zeros(1000, dtype=torch.uint8), DeltaEncoder(), DeltaDecoder()
    send(encoder, decoder, message)
    encoder.encode(KEY, message.clone(), 2)  # lost
    encoding, sent = encoder.encode(KEY, message.clone(), 2)
    with raises("sync.delta-order", "delta 2 of bucket 0 from training rank 3", "number 1", "holds 0"):
        decoder.decode(KEY, sent, encoding)
    with raises("sync.delta-order", "holds none"):
        DeltaDecoder().decode(KEY, sent, encoding)
    with raises("sync.delta-size", "3 bytes", "1 words"):
        decoder.decode(KEY, sent[:3], encoding._replace(number=1))


def change(setup, step):
    """Change one element of each parameter of the checkpoint."""
    weights = setup.checkpoint(0)
    for number in range(1, step + 1):
        for tensor in weights.values():
            tensor.flatten()[number % tensor.numel()] += number
    setup.checkpoint = lambda _: weights
    setup.source.ranks = setup.trainer(step)


@settings(max_examples=10)
@given(plan_cases(), st.integers(0, 2))
def test_engines_hold_the_trainers_weights_after_each_delta_sync(case, full_freq):
    """Every family, layout and replica count; the engine's dtype is bfloat16 except for float32 parameters."""
    tp, ep, replicas, _ = case.rollout
    options = {"transport": "inline", "ep": ep, "dtype": torch.bfloat16, "held": torch.float32, "verify_freq": 1}
    setup = Setup(case.weight_map, case.train, tp, replicas, delta=full_freq, **options)
    try:
        for step in range(4):
            change(setup, step)
            saved = setup.manager.sync_weights()["weight_sync/saved_bytes"]
            setup.assert_engines_hold(step)
            assert saved >= 0 and (saved == 0 or (step > 0 and full_freq != 1))
    finally:
        setup.close()


def test_messages_on_one_node_are_sent_as_packed():
    """Half of the pairs share a node: they use shared memory."""
    layout = ParallelLayout(2, 1, 1)
    setup = Setup(weight_map_of(), layout, 2, 1, transport="auto", places=two_nodes(2, 2), delta=0, verify_freq=1)
    try:
        for step in range(3):
            change(setup, step)
            setup.manager.sync_weights()
            setup.assert_engines_hold(step)
        kept = [set(sender._delta._kept) for sender in setup.source.senders]
        assert all(dst_rank % 2 != rank for rank, keys in enumerate(kept) for dst_rank, _ in keys)
        assert any(kept)
    finally:
        setup.close()


@pytest.mark.parametrize("side", ["source", "target"])
def test_the_sync_after_a_failure_is_full(side):
    setup = Setup(weight_map_of(), ParallelLayout(2, 1, 1), 1, 2, transport="inline", delta=0, verify_freq=1)
    try:
        for step in range(2):
            change(setup, step)
            setup.manager.sync_weights()
        end, event = {"source": (setup.source, ("export", 1)), "target": (setup.target, ("import", 1))}[side]
        end.fail_at = event
        change(setup, 2)
        with raises("sync.failed", "lost rank"):
            setup.manager.sync_weights()
        end.fail_at = None
        setup.source.settle()
        setup.target.settle()
        assert setup.manager.sync_weights()["weight_sync/saved_bytes"] == 0
        setup.assert_engines_hold(2)
        change(setup, 3)
        assert setup.manager.sync_weights()["weight_sync/saved_bytes"] > 0
        setup.assert_engines_hold(3)
    finally:
        setup.close()


def test_copies_count_as_memory_of_the_sync():
    """Each side keeps all messages of its rank once."""
    case = Setup(weight_map_of(), ParallelLayout(1, 1, 1), 1, 1, transport="inline", delta=0)
    try:
        case.source.ranks = case.trainer(0)
        case.manager.sync_weights()
        assert case.source.senders[0]._delta.nbytes == case.plan.nbytes
        assert case.target.receivers[0]._delta.nbytes == case.plan.nbytes
        assert case.manager.sync_weights()["weight_sync/peak_mb"] >= case.plan.nbytes / 2**20
    finally:
        case.close()


def test_twenty_optimizer_steps_of_a_model_in_bfloat16():
    """Adam at a learning rate of 1e-6, as in RL: few of the weights change in bfloat16, and all arrive."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    policy = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    sent = []
    for _ in range(21):
        weights = torch.cat([parameter.detach().bfloat16().flatten() for parameter in policy.parameters()])
        sent.append(send(encoder, decoder, weights.view(torch.uint8)) / (2 * len(weights)))
        tokens = torch.randint(0, 256, (4, 32))
        policy(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sent[0] == 1.0 and 0.001 < sum(sent[1:]) / 20 < 0.1
