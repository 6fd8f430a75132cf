"""Log-probs, entropies, values and their gradients equal Hugging Face's in every layout."""

import pytest
import torch
from engine_cases import Setup, assemble, forward, in_parts, train
from support.release import of_release
from tiny_models import TEMPERATURE, policy_reference, rows, save_model, value_reference

from megarl.megatron import OptimizerOptions
from megarl.models import ParallelLayout

LAYOUTS = {
    "tp1": Setup(ParallelLayout()),
    "tp2": Setup(ParallelLayout(tp=2)),
    "tp2sp": Setup(ParallelLayout(tp=2), sequence_parallel=True),
    "pp2": Setup(ParallelLayout(pp=2)),
    "dp2": Setup(ParallelLayout(dp=2)),
    "tp2pp2": Setup(ParallelLayout(tp=2, pp=2)),
    "tp2pp2sp": Setup(ParallelLayout(tp=2, pp=2), sequence_parallel=True),
    "tp2dp2sp": Setup(ParallelLayout(tp=2, dp=2), sequence_parallel=True),
    "tp1_one_row": Setup(ParallelLayout(), rows_per_micro_batch=1),
    "pp2_all_rows": Setup(ParallelLayout(pp=2), rows_per_micro_batch=8),
}
MODELS = {
    "qwen2": {"family": "qwen2"},
    "qwen2_tied": {"family": "qwen2", "tied": True},
    "qwen3_tied": {"family": "qwen3", "tied": True},
    "llama": {"family": "llama"},
    "critic": {"family": "qwen2", "critic": True},
}


class Reference:
    """A model, and its outputs and gradients from plain transformers and autograd."""

    def __init__(self, path, critic, model):
        self.path, self.critic, self.model = path, critic, model
        self.rows = rows()
        model.zero_grad()
        loss = torch.zeros(())
        self.outputs, self.metrics = [], {"nll": 0.0, "entropy": 0.0, "loss": 0.0}
        for row in self.rows:
            if critic:
                values = value_reference(model, row)
                loss = loss + ((values - row.returns).square() * row.weights).sum()
                self.outputs.append(values.detach())
            else:
                log_probs, entropy = policy_reference(model, row)
                nll, bonus = -(log_probs * row.weights).sum(), (entropy * row.weights).sum()
                loss = loss + nll - 0.3 * bonus
                self.metrics["nll"] += nll.item()
                self.metrics["entropy"] += bonus.item()
                self.outputs.append((log_probs.detach(), entropy.detach()))
        loss.backward()
        self.metrics["loss"] = loss.item()
        self.grads = {name: param.grad for name, param in model.named_parameters()}
        self.grad_norm = torch.stack([grad.square().sum() for grad in self.grads.values()]).sum().sqrt().item()


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    built = {}
    for name, settings in MODELS.items():
        path = tmp_path_factory.mktemp(name)
        built[name] = Reference(path, "critic" in settings, save_model(path, **settings))
    return built


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", of_release(["tp2", "pp2", "tp2pp2sp"], ["tp1", "tp2sp", "tp2pp2"]))
def test_outputs_equal_hugging_face(pool, references, model, layout):
    reference = references[model]
    setup = LAYOUTS[layout]._replace(value_head=reference.critic)
    answers = pool.run(forward, setup.layout.world_size, reference.path, setup, reference.rows)
    last_stage = range(setup.layout.rank(pp=setup.layout.pp - 1), setup.layout.world_size)
    assert [answer is not None for answer in answers] == [rank in last_stage for rank in range(len(answers))]
    for rank in last_stage:
        packed = (answers[rank],) if reference.critic else answers[rank]
        for index, flat in enumerate(packed):
            expected = [output if reference.critic else output[index] for output in reference.outputs]
            for ours, theirs in zip(in_parts(flat, reference.rows), expected, strict=True):
                assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("model", of_release(["qwen2_tied", "critic"], ["qwen2"]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_metrics_equal_autograd_in_every_layout(pool, references, model, layout):
    check_training(pool, references[model], LAYOUTS[layout])


def test_gradients_of_norms_on_queries_and_keys(pool, references):
    check_training(pool, references["qwen3_tied"], LAYOUTS["tp2pp2sp"])


def check_training(pool, reference, setup):
    # Without the distributed optimizer each data-parallel rank has the whole gradient.
    optimizer = OptimizerOptions(use_distributed_optimizer=False)
    setup = setup._replace(value_head=reference.critic, optimizer=optimizer)
    results = pool.run(train, setup.layout.world_size, reference.path, setup, [reference.rows])
    grads = assemble(reference.path, setup, [result.grads for result in results])
    scale = max(grad.abs().max().item() for grad in reference.grads.values())
    for name, theirs in reference.grads.items():
        torch.testing.assert_close(grads[name], theirs, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
    for result in results:
        assert result.steps[0].grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
        assert not result.steps[0].skipped
        assert result.metrics == results[0].metrics
        for name, value in result.metrics[0].items():
            assert value == pytest.approx(reference.metrics[name], rel=1e-5)


@pytest.mark.parametrize("layout", ["tp1", "dp2", "tp2dp2sp", "tp2pp2sp"])
def test_steps_equal_torch_adamw(pool, references, layout):
    """Three clipped steps of the distributed optimizer, with tied embeddings, against torch's AdamW."""
    reference = references["qwen2_tied"]
    options = OptimizerOptions(lr=1e-2, weight_decay=0.1, clip_grad=0.5, eps=1e-3, warmup_steps=2)
    setup = LAYOUTS[layout]._replace(optimizer=options)
    batches = [rows(seed) for seed in (1, 2, 3)]
    results = pool.run(train, setup.layout.world_size, reference.path, setup, batches)
    ours = assemble(reference.path, setup, [result.weights for result in results])

    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(reference.path, dtype=torch.float32).eval()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1.0, eps=1e-3
    )
    for batch, lr in zip(batches, (0.5e-2, 1e-2, 1e-2), strict=True):
        adam.zero_grad()
        for row in batch:
            log_probs, entropy = policy_reference(model, row, TEMPERATURE)
            (-(log_probs * row.weights).sum() - 0.3 * (entropy * row.weights).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
    for name, theirs in model.named_parameters():
        torch.testing.assert_close(ours[name], theirs.detach(), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert [step.lr for step in results[0].steps] == [0.5e-2, 1e-2, 1e-2]


def test_missing_value_head_starts_at_zero(pool, references):
    reference = references["llama"]
    setup = LAYOUTS["tp2"]._replace(value_head=True)
    answers = pool.run(forward, 2, reference.path, setup, reference.rows)
    assert answers[0].shape == (sum(len(row.response) for row in reference.rows),)
    assert not answers[0].any()


def test_entropy_is_none_unless_requested(pool, references):
    reference = references["llama"]
    (log_probs, entropies), _ = pool.run(forward, 2, reference.path, LAYOUTS["tp2"], reference.rows, False)
    assert entropies == [None, None, None]
    assert (log_probs < 0).all()


def test_bfloat16_is_near_float32(pool, references):
    """Half-precision training in the most divided layout, with float32 master weights; results agree roughly."""
    reference = references["qwen2_tied"]
    setup = LAYOUTS["tp2pp2sp"]._replace(dtype=torch.bfloat16, optimizer=OptimizerOptions(lr=1e-6))
    results = pool.run(train, 4, reference.path, setup, [reference.rows] * 2)
    assert all(tensor.dtype is torch.bfloat16 for tensor in results[0].weights.values())
    for step in results[0].steps:
        assert step.grad_norm == pytest.approx(reference.grad_norm, rel=0.1)
    assert results[3].metrics[0]["nll"] == pytest.approx(reference.metrics["nll"], rel=0.05)
