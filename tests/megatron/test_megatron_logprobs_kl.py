"""The exact KL against torch's softmax over the whole vocabulary, value and gradient."""

import pytest
import torch

from megarl.megatron.layers.logprobs import ReferenceHead, vocab_parallel_outputs
from megarl.models import partition

VOCABULARY, PADDED = 11, 16


def exact_kl(logits, ref_logits, temperature):
    """Exact KL to a reference whose output layer is the identity."""
    kl = vocab_parallel_outputs(
        logits,
        torch.zeros(len(logits), dtype=torch.int64),
        vocab_size=VOCABULARY,
        temperature=temperature,
        reference=ReferenceHead(ref_logits, [torch.eye(PADDED)]),
    ).ref_kl
    assert kl is not None
    return kl


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradient(temperature):
    generator = torch.Generator().manual_seed(3)
    logits, ref = (4 * torch.randn(7, PADDED, generator=generator) for _ in range(2))
    logits[0] = ref[0]
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    kl = exact_kl(ours, ref, temperature)
    log_p, log_q = ((x[:, :VOCABULARY] / temperature).log_softmax(-1) for x in (theirs, ref))
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(kl, expected, rtol=1e-5, atol=1e-6)
    assert kl[0].abs() < 1e-6 and (kl[1:] > 0.1).all()
    weights = torch.linspace(-1, 2, 7)
    (weights * kl).sum().backward()
    (weights * expected).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=5e-6)
    assert (ours.grad[:, VOCABULARY:] == 0).all()


def test_each_token_has_its_own_reference(monkeypatch):
    """References of other hidden sizes and number formats, against one call per reference."""
    generator = torch.Generator().manual_seed(5)
    logits, tokens, temperature = 4 * torch.randn(9, PADDED, generator=generator), 9, 0.7
    weights = [torch.randn(PADDED, 6, generator=generator), torch.randn(PADDED, 3, generator=generator).bfloat16()]
    numbers = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1], dtype=torch.int16)
    hidden = torch.randn(tokens, 6, generator=generator).bfloat16().float()  # as the second reference returns them
    monkeypatch.setattr(partition, "LOGITS_CHUNK_BYTES", 4 * PADDED * 4)

    def kl(leaf, reference):
        targets = torch.zeros(len(leaf), dtype=torch.int64)
        outputs = vocab_parallel_outputs(
            leaf, targets, vocab_size=VOCABULARY, temperature=temperature, reference=reference
        )
        assert outputs.ref_kl is not None
        return outputs.ref_kl

    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    together, apart = kl(ours, ReferenceHead(hidden, weights, numbers)), torch.zeros(tokens)
    for number, weight in enumerate(weights):
        rows = numbers == number
        log_q = (hidden[rows, : weight.shape[1]].to(weight.dtype) @ weight.T).float()[:, :VOCABULARY] / temperature
        log_p = (theirs[rows, :VOCABULARY] / temperature).log_softmax(-1)
        apart[rows] = (log_p.exp() * (log_p - log_q.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)
    weighting = torch.linspace(-1, 2, tokens)
    (weighting * together).sum().backward()
    (weighting * apart).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=5e-6)


def test_nonpositive_temperature_raises():
    with pytest.raises(ValueError, match="temperature=0"):
        exact_kl(torch.zeros(1, PADDED), torch.zeros(1, PADDED), 0)
