"""Planned against measured peak memory of log-probs, entropies and exact KL from logits, with and without backward."""

from dataclasses import replace

import pytest
import torch
from alive import Alive
from planned_jobs import megatron, train_job

from megarl.megatron.layers.logprobs import ReferenceHead, vocab_parallel_outputs
from megarl.models import partition
from megarl.ops.plan.job import PlannedPass
from megarl.ops.plan.pass_activations import logits_bytes, padded_vocab, tokens_on_rank

TOKENS, HIDDEN = 16, 4


def role(dtype):
    actor = train_job("Qwen2.5-7B", megatron(dtype=dtype), devices=1).role("actor")
    return replace(actor, model=replace(actor.model, vocab_size=4096, hidden_size=HIDDEN))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("with_entropy", "references"), [(False, 0), (True, 0), (False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [TOKENS // 4, TOKENS])
def test_planned_logits_memory_equals_the_measured_peak(
    monkeypatch,
    dtype,
    with_entropy,
    references,
    updates,
    tokens_per_chunk,
):
    model = role(dtype)
    monkeypatch.setattr(partition, "LOGITS_CHUNK_BYTES", tokens_per_chunk * padded_vocab(model) * 4)
    planned = PlannedPass("update", updates, TOKENS, TOKENS, 1, 1, 0, with_entropy, references > 0)
    plan = logits_bytes(model, planned, tokens_on_rank(model, planned))
    vocab, torch_dtype = model.model.vocab_size, getattr(torch, dtype)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch_dtype)
    weight = torch.randn(padded_vocab(model), HIDDEN, dtype=torch_dtype, requires_grad=updates)
    targets = torch.zeros(TOKENS, dtype=torch.int64)
    with Alive([hidden, weight, targets]) as alive, torch.set_grad_enabled(updates):
        loss = _loss(hidden, weight, targets, vocab, with_entropy, references)
        if updates:
            loss.backward()
    assert plan == pytest.approx(alive.peak, rel=0.01)


def _loss(hidden, weight, targets, vocab, with_entropy, references):
    logits = hidden @ weight.T
    numbers = torch.arange(TOKENS, dtype=torch.int16) % 2 if references == 2 else None
    outputs = vocab_parallel_outputs(
        logits,
        targets,
        vocab_size=vocab,
        with_entropy=with_entropy,
        reference=ReferenceHead(hidden, [weight.detach()] * references, numbers) if references else None,
        overwrite_logits=True,
    )
    loss = outputs.log_probs.sum()
    if outputs.entropy is not None:
        loss = loss + outputs.entropy.sum()
    if outputs.ref_kl is not None:
        loss = loss + outputs.ref_kl.sum()
    return loss
