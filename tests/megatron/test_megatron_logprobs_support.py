"""Distributions renormalized over the sampled support, against dense float64 log-softmax of masked logits."""

import pytest
import torch

from megarl.megatron.layers.logprobs import ReferenceHead, vocab_parallel_outputs
from megarl.models import partition

VOCABULARY, PADDED, TEMPERATURE = 11, 16, 0.7
SUPPORTS = [
    [3, 9, 1, 10],  # both ranks
    [0, 4, 5, -1],  # the first of two ranks only
    [8, 10, 9, -1],  # the second only
    [6, -1, -1, -1],  # one token
    [-1, -1, -1, -1],  # none: the whole vocabulary
    [2, 7, -1, -1],  # far below the maximum
]
TARGETS = [9, 5, 8, 6, 4, 7]
N = len(SUPPORTS)


def sample():
    generator = torch.Generator().manual_seed(7)
    logits, ref = (4 * torch.randn(N, PADDED, generator=generator, dtype=torch.float64) for _ in range(2))
    logits[5, [2, 7]] = torch.tensor([-200.0, -201.5], dtype=torch.float64)
    ref[5, [2, 7]] = torch.tensor([-150.0, -149.0], dtype=torch.float64)
    return logits, ref, torch.randn(3, N, generator=generator, dtype=torch.float64)


def enumerated(logits):
    """Log-probs of every token; -inf outside the support."""
    outside = torch.ones(N, VOCABULARY, dtype=torch.bool)
    for row, ids in enumerate(SUPPORTS):
        for token in range(VOCABULARY):
            outside[row, token] = token not in ids and max(ids) >= 0
    return (logits[:, :VOCABULARY] / TEMPERATURE).masked_fill(outside, -torch.inf).log_softmax(-1)


def expected():
    """Log-probs, entropies, KL, squares, and the gradient of a weighted sum of the first three, in float64."""
    logits, ref, weights = sample()
    leaf = logits.clone().requires_grad_()
    log_p, log_q = enumerated(leaf), enumerated(ref)
    p = log_p.exp()
    finite = log_p.masked_fill(p == 0, 0)
    chosen, entropy = log_p[torch.arange(N), TARGETS], -(p * finite).sum(-1)
    kl = (p * (finite - log_q.masked_fill(p == 0, 0))).sum(-1)
    (torch.stack([chosen, entropy, kl]) * weights).sum().backward()
    return chosen.detach(), entropy.detach(), kl.detach(), p.square().sum(-1).detach(), leaf.grad


def shard_outputs(place):
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{place.port}", rank=place.rank, world_size=place.world_size
    )
    try:
        return outputs(place.rank, place.world_size, torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()


def outputs(rank=0, ranks=1, group=None, **options):
    logits, ref, weights = sample()
    leaf = logits.float().chunk(ranks, dim=1)[rank].clone().requires_grad_()
    head = torch.eye(PADDED).chunk(ranks)[rank]
    found = vocab_parallel_outputs(
        leaf * 1,
        torch.tensor(TARGETS),
        vocab_size=VOCABULARY,
        temperature=TEMPERATURE,
        with_entropy=True,
        with_sum_pi_squared=True,
        reference=ReferenceHead(ref.float(), [head]),
        support=torch.tensor(SUPPORTS),
        group=group,
        **options,
    )
    (torch.stack([found.log_probs, found.entropy, found.ref_kl]) * weights).sum().backward()
    values = [found.log_probs, found.entropy, found.ref_kl, found.sum_pi_squared]
    return [value.detach() for value in values], leaf.grad, found.is_argmax


def check(values, grad):
    *truth, true_grad = expected()
    for ours, theirs in zip(values, truth, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=3e-6)
    torch.testing.assert_close(grad.double(), true_grad, rtol=1e-5, atol=1e-5)
    for row, ids in enumerate(SUPPORTS[:4]):
        outside = [token for token in range(PADDED) if token not in ids]
        assert (grad[row, outside] == 0).all()


@pytest.mark.parametrize("rows_per_chunk", [1, 4, N])
@pytest.mark.parametrize("overwrite_logits", [False, True])
def test_one_rank(monkeypatch, rows_per_chunk, overwrite_logits):
    monkeypatch.setattr(partition, "LOGITS_CHUNK_BYTES", rows_per_chunk * PADDED * 4)
    values, grad, is_argmax = outputs(overwrite_logits=overwrite_logits)
    check(values, grad)
    likeliest = enumerated(sample()[0]).argmax(-1)
    assert is_argmax.tolist() == [target == best for target, best in zip(TARGETS, likeliest.tolist(), strict=True)]
    assert values[0][3] == 0 and values[1][3] == 0  # one token has all of the probability


def test_two_ranks(pool):
    answers = pool.run(shard_outputs, 2)
    grad = torch.cat([grad for _, grad, _ in answers], dim=1)
    for values, _, is_argmax in answers:
        check(values, grad)
        assert torch.equal(is_argmax, outputs()[2])


def test_gradient_over_the_support_is_that_of_the_sampled_objective():
    """The expected gradient of ratio times advantage, enumerated over all tokens, against autograd."""
    generator = torch.Generator().manual_seed(2)
    logits, advantages = (3 * torch.randn(6, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2))
    ranked, order = logits.softmax(-1).sort(dim=-1, descending=True)
    support = order.masked_fill(ranked.cumsum(-1) - ranked >= 0.7, -1)  # top_p=0.7
    inside = torch.zeros(6, VOCABULARY + 1, dtype=torch.bool).scatter_(1, support.where(support >= 0, VOCABULARY), True)
    leaf = logits.clone().requires_grad_()
    behaviour = leaf.masked_fill(~inside[:, :VOCABULARY], -torch.inf).softmax(-1)
    (behaviour * advantages).sum().backward()
    mu = behaviour.detach()

    def estimate(sampled_support):
        """Sum over tokens of mu times the gradient of the ratio times the advantage."""
        ours = logits.float().requires_grad_()
        for token in range(VOCABULARY):
            targets = torch.full((6,), token)
            log_probs = vocab_parallel_outputs(ours, targets, vocab_size=VOCABULARY, support=sampled_support).log_probs
            ratio = (log_probs - log_probs.detach()).exp()
            (mu[:, token] * ratio * advantages[:, token]).sum().backward()
        return ours.grad.double()

    torch.testing.assert_close(estimate(support), leaf.grad, rtol=0, atol=1e-6)
    assert (estimate(None) - leaf.grad).abs().max() > 1e-2
