import pytest
import torch
from alive import Alive

from megarl.megatron.layers.logprobs import ReferenceHead, vocab_parallel_outputs
from megarl.models import partition

VOCAB, N = 23, 7


def sample(width, scale=3.0):
    """Logits whose padding columns would win if they counted, targets, and weights of the outputs in a loss."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, width, generator=generator, dtype=torch.float64) * scale
    logits[:, VOCAB:] = 50.0
    targets = torch.randint(0, VOCAB, (N,), generator=generator)
    targets[:2] = logits[:2, :VOCAB].argmax(-1)
    return logits, targets, torch.randn(2, N, generator=generator)


def expected(logits, targets, weights, temperature):
    """Log-probs, entropies, and the gradient of their weighted sum, by torch's log-softmax in float64."""
    leaf = logits.clone().requires_grad_()
    log_probs = (leaf[:, :VOCAB] / temperature).log_softmax(-1)
    chosen = log_probs[torch.arange(N), targets]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    ((chosen * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    return chosen.detach(), entropy.detach(), leaf.grad


def shard_outputs(place, width, temperature):
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{place.port}", rank=place.rank, world_size=place.world_size
    )
    try:
        logits, targets, weights = sample(width)
        local = logits.float().chunk(place.world_size, dim=1)[place.rank].clone().requires_grad_()
        outputs = vocab_parallel_outputs(
            local,
            targets,
            vocab_size=VOCAB,
            temperature=temperature,
            with_entropy=True,
            with_sum_pi_squared=True,
            group=torch.distributed.group.WORLD,
        )
        log_probs, entropy, is_argmax = outputs.log_probs, outputs.entropy, outputs.is_argmax
        assert not outputs.sum_pi_squared.requires_grad
        ((log_probs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
        return log_probs.detach(), entropy.detach(), local.grad, is_argmax, outputs.sum_pi_squared
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize(("ranks", "width"), [(2, 32), (2, 48), (3, 24)])
def test_sharded_vocabulary_equals_whole_vocabulary(pool, ranks, width, temperature):
    """At width 48 the second of two ranks holds padding only."""
    logits, targets, weights = sample(width)
    log_probs, entropy, grad = expected(logits, targets, weights.double(), temperature)
    answers = pool.run(shard_outputs, ranks, width, temperature)
    likeliest = logits[:, :VOCAB].argmax(-1) == targets
    assert likeliest.any() and not likeliest.all()
    squares = (logits[:, :VOCAB] / temperature).softmax(-1).square().sum(-1)
    for ours, theirs, _, is_argmax, sums in answers:
        torch.testing.assert_close(sums.double(), squares, rtol=0, atol=1e-6)
        assert torch.equal(is_argmax, likeliest)
        torch.testing.assert_close(ours.double(), log_probs, rtol=0, atol=2e-6)
        torch.testing.assert_close(theirs.double(), entropy, rtol=0, atol=2e-6)
    torch.testing.assert_close(torch.cat([answer[2] for answer in answers], dim=1).double(), grad, rtol=0, atol=2e-6)


def one_rank(logits, targets, **options):
    return vocab_parallel_outputs(logits, targets, vocab_size=VOCAB, **options)[:2]


def test_huge_logits_stay_finite():
    logits, targets, weights = sample(VOCAB, scale=2000.0)
    log_probs, entropy, grad = expected(logits, targets, weights.double(), 1.0)
    leaf = logits.float().requires_grad_()
    ours, ours_entropy = one_rank(leaf, targets, with_entropy=True)
    ((ours * weights[0]).sum() + (ours_entropy * weights[1]).sum()).backward()
    torch.testing.assert_close(ours.detach().double(), log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_entropy.detach().double(), entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), grad, rtol=1e-4, atol=1e-4)


def test_sum_of_squared_probabilities_needs_no_entropy_and_no_copy(monkeypatch):
    logits, targets, _ = sample(VOCAB, scale=2000.0)
    outputs = vocab_parallel_outputs(logits.float(), targets, vocab_size=VOCAB, with_sum_pi_squared=True)
    assert outputs.entropy is None and outputs.sum_pi_squared is not None
    torch.testing.assert_close(outputs.sum_pi_squared, torch.ones(N))  # the largest logit has all of the probability
    uniform = vocab_parallel_outputs(torch.zeros(N, VOCAB), targets, vocab_size=VOCAB, with_sum_pi_squared=True)
    torch.testing.assert_close(uniform.sum_pi_squared, torch.full((N,), 1 / VOCAB))
    chunk = 16 * 1024 * 4
    monkeypatch.setattr(partition, "LOGITS_CHUNK_BYTES", chunk)
    many, targets = torch.randn(512, 1024), torch.zeros(512, dtype=torch.int64)
    with Alive([many, targets]) as alive:
        vocab_parallel_outputs(many, targets, vocab_size=1024, with_entropy=True, with_sum_pi_squared=True)
    assert alive.peak < 3 * chunk


def test_entropy_only_and_log_probs_only_losses():
    logits, targets, weights = sample(32)
    for index in (0, 1):
        only = torch.zeros(2, N)
        only[index] = weights[index]
        leaf = logits.float().requires_grad_()
        outputs = one_rank(leaf, targets, with_entropy=True)
        (outputs[index] * weights[index]).sum().backward()
        _, _, grad = expected(logits, targets, only.double(), 1.0)
        torch.testing.assert_close(leaf.grad.double(), grad, rtol=0, atol=2e-6)


def test_without_entropy_the_gradient_is_the_same():
    logits, targets, weights = sample(32)
    leaf = logits.float().requires_grad_()
    log_probs, entropy = one_rank(leaf, targets)
    assert entropy is None
    (log_probs * weights[0]).sum().backward()
    _, _, grad = expected(logits, targets, torch.stack([weights[0], torch.zeros(N)]).double(), 1.0)
    torch.testing.assert_close(leaf.grad.double(), grad, rtol=0, atol=2e-6)


def test_half_precision_logits_get_half_precision_gradients():
    logits, targets, _ = sample(32)
    leaf = logits.bfloat16().requires_grad_()
    log_probs, _ = one_rank(leaf, targets)
    assert log_probs.dtype is torch.float32
    torch.testing.assert_close(
        log_probs.detach(), leaf.detach()[:, :VOCAB].float().log_softmax(-1)[torch.arange(N), targets]
    )
    log_probs.sum().backward()
    assert leaf.grad.dtype is torch.bfloat16


def test_no_response_tokens():
    leaf = torch.randn(0, 32, requires_grad=True)
    log_probs, entropy = one_rank(leaf, torch.empty(0, dtype=torch.int64), with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert leaf.grad.shape == (0, 32)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match="must be positive"):
        one_rank(torch.randn(1, 32), torch.tensor([0]), temperature=temperature)


@pytest.mark.parametrize("rows_per_chunk", [1, 3, N])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_no_bit(monkeypatch, rows_per_chunk, dtype):
    logits, targets, weights = sample(32)
    ref = ReferenceHead(torch.randn(N, 32, generator=torch.Generator().manual_seed(1)), [torch.eye(32)])
    ids = (targets[:, None] + torch.arange(3)) % VOCAB
    results = []
    for size in (2**28, rows_per_chunk * 32 * 4):
        monkeypatch.setattr(partition, "LOGITS_CHUNK_BYTES", size)
        leaf = logits.to(dtype).requires_grad_()
        out = vocab_parallel_outputs(
            leaf,
            targets,
            vocab_size=VOCAB,
            with_entropy=True,
            with_sum_pi_squared=True,
            temperature=0.7,
            reference=ref,
            ids=ids,
        )
        (out.log_probs @ weights[0] + out.entropy @ weights[1] + out.ref_kl.sum() + out.ids_log_probs.sum()).backward()
        results.append([*out, leaf.grad])
    for whole, chunked in zip(*results, strict=True):
        assert torch.equal(whole, chunked)


def test_gradient_overwrites_logits_once():
    logits, targets, weights = sample(32)
    _, _, grad = expected(logits, targets, weights.double(), 1.0)
    leaf = logits.float().requires_grad_()
    copy = leaf * 1  # logits of a model are not a leaf
    outputs = vocab_parallel_outputs(copy, targets, vocab_size=VOCAB, with_entropy=True, overwrite_logits=True)
    loss = outputs.log_probs @ weights[0] + outputs.entropy @ weights[1]
    loss.backward(retain_graph=True)
    torch.testing.assert_close(leaf.grad.double(), grad, rtol=0, atol=2e-6)
    assert torch.equal(copy.detach(), leaf.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_memory_beside_the_logits_is_one_chunk(monkeypatch, with_entropy):
    """Forward and backward together need a few tensors of a chunk's size, whatever the number of tokens."""
    chunk = 16 * 1024 * 4
    monkeypatch.setattr(partition, "LOGITS_CHUNK_BYTES", chunk)
    hidden, weight = torch.randn(512, 4).bfloat16(), torch.randn(4, 1024).bfloat16().requires_grad_()
    targets = torch.zeros(512, dtype=torch.int64)
    with Alive([hidden, weight, targets]) as alive:
        outputs = vocab_parallel_outputs(
            hidden @ weight, targets, vocab_size=1024, with_entropy=with_entropy, overwrite_logits=True
        )
        sum(output.sum() for output in outputs if output is not None and output.dtype is torch.float32).backward()
    of_logits = 512 * 1024 * 2
    assert alive.peak < of_logits + 4.5 * chunk < 2 * of_logits
