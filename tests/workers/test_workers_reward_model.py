"""Reward models in every layout: scores and updates equal plain transformers and torch."""

from dataclasses import replace

import pytest
import torch
from role_processes import BUDGETS, LAYOUTS, Role, role_settings
from support.release import of_release
from support.whole_tensors import whole_tensors
from tiny_policies import (
    PAD,
    VOCAB,
    adam_of,
    answers,
    clipped_step,
    load_model,
    rows_of,
    save_model,
)
from transformers import AutoModelForSequenceClassification

from megarl.data import DataProto, attention_mask_of, pad_left, pad_right
from megarl.models import ParallelLayout
from megarl.workers.reward_model import RewardModelWorker, RewardTrainingWorker

CASES = {**LAYOUTS, "tp2 pp2": ParallelLayout(tp=2, pp=2)}
NAMES = of_release(["cp2", "dp2", "tp2 pp2"], ["tp1", "tp2", "pp2"])
CENTER = 0.05


def score(model, sequences):
    """Scores of transformers' sequence classification model, for all padded sequences at once."""
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(ids) for ids in sequences])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return model(input_ids=ids, attention_mask=mask).logits[:, 0]


@pytest.fixture(scope="module")
def batch():
    """Responses; one ends in the model's padding token, and one has no token."""
    rows = answers()
    tensors = {name: tensor.clone() for name, tensor in rows.tensors.items()}
    length = int(tensors["attention_mask"][0, tensors["prompts"].shape[1] :].sum())
    tensors["responses"][0, length - 2 : length] = PAD
    tensors["attention_mask"][5, tensors["prompts"].shape[1] :] = tensors["responses"][5] = 0
    return DataProto.from_dict(tensors)


@pytest.mark.parametrize("layout", NAMES)
def test_scores_equal_transformers(role_pool, models, batch, layout):
    sequences = [torch.cat([row.prompt, row.response]) for row in rows_of(batch)]
    with torch.no_grad():
        expected = score(load_model(models.critic_path, critic=True), sequences)
    settings = role_settings(models.critic_path, CASES[layout], learns=False)
    budget = replace(BUDGETS["tokens"], share_prompts=True)
    with Role(role_pool, RewardModelWorker, CASES[layout], {"settings": settings, "budget": budget}) as role:
        scores = role.map("compute_rm_score", batch).tensors["rm_scores"]
        role.rebuild(budget=BUDGETS["one row"])
        assert torch.allclose(role.map("compute_rm_score", batch).tensors["rm_scores"], scores, rtol=0, atol=1e-6)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def test_a_model_with_experts_in_an_interleaved_pipeline(role_pool, batch, tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    changes = {**experts, "head_dim": 8, "mlp_only_layers": [], "num_hidden_layers": 4}
    model = save_model(tmp_path / "model", "qwen3_moe", critic=True, **changes)
    with torch.no_grad():
        expected = score(model, [torch.cat([row.prompt, row.response]) for row in rows_of(batch)])
    for layout in (ParallelLayout(dp=2, ep=2), ParallelLayout(pp=2, vpp=2)):
        budget = replace(BUDGETS["tokens"], multiple=layout.pp if layout.vpp > 1 else 1)
        arguments = {"settings": role_settings(tmp_path / "model", layout, learns=False), "budget": budget}
        with Role(role_pool, RewardModelWorker, layout, arguments) as role:
            scores = role.map("compute_rm_score", batch).tensors["rm_scores"]
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def pairs():
    """Eight pairs: with a common prefix, without, one the prefix of the other; one ends in padding."""
    generator = torch.Generator().manual_seed(3)

    def draw(length):
        return torch.randint(1, VOCAB, (length,), generator=generator)

    sequences = []
    for common, chosen, rejected in [
        (4, 3, 2),
        (0, 5, 6),
        (3, 0, 4),
        (6, 2, 2),
        (1, 7, 1),
        (5, 1, 0),
        (2, 2, 9),
        (4, 4, 4),
    ]:
        prompt = draw(common)
        sequences.append((torch.cat([prompt, draw(chosen)]), torch.cat([prompt, draw(rejected)])))
    sequences[3][0][-1] = PAD
    first, second = ([ids.tolist() for ids in half] for half in zip(*sequences, strict=True))
    tensors = {"chosen": pad_left(first), "rejected": pad_right(second)}
    widths = (tensor.shape[1] for tensor in tensors.values())
    tensors["attention_mask"] = attention_mask_of([*map(len, first)], [*map(len, second)], *widths)
    tensors["margins"] = torch.linspace(0.0, 2.0, len(sequences))
    return DataProto.from_dict(tensors, {"index": range(len(sequences))}), sequences


def train(model, sequences, steps):
    """Steps of torch's AdamW on all pairs at once, by the equation of the paper."""
    adam = adam_of(model)
    results = []
    for step in range(steps):
        chosen, rejected = (score(model, list(half)) for half in zip(*sequences, strict=True))
        margins = torch.linspace(0.0, 2.0, len(sequences))
        likelihoods = [1 / (1 + (-(c - r - m)).exp()) for c, r, m in zip(chosen, rejected, margins, strict=True)]
        center = CENTER * ((chosen + rejected) ** 2).mean()
        loss = -sum(p.log() for p in likelihoods) / len(likelihoods) + center
        adam.zero_grad()
        loss.backward()
        norm, lr = clipped_step(model, adam, step)
        right = sum(float(c > r) for c, r in zip(chosen, rejected, strict=True)) / len(sequences)
        apart = (chosen - rejected).mean().item()
        results.append({"loss": loss.item(), "accuracy": right, "margin": apart, "grad_norm": norm, "lr": lr})
    return results


@pytest.mark.parametrize(("layout", "start"), [*((name, "reward model") for name in NAMES), ("pp2", "language model")])
def test_updates_equal_plain_torch(role_pool, models, layout, start):
    batch, sequences = pairs()
    path = models.critic_path if start == "reward model" else models.policy_path
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=1)
    if start == "language model":
        torch.nn.init.zeros_(model.score.weight)
    expected = train(model, sequences, steps=2)
    arguments = {
        "settings": role_settings(path, CASES[layout]),
        "budget": BUDGETS["one row"] if layout == "tp1" else replace(BUDGETS["tokens"], max_tokens=32),
        "center_coefficient": CENTER,
        "pad_token_id": PAD,
    }
    with Role(role_pool, RewardTrainingWorker, CASES[layout], arguments) as role:
        for expected_metrics in expected:
            metrics = role.update("update_reward_model", batch, len(batch))
            results = {name.removeprefix("train/"): value for name, value in metrics.items()}
            assert {name: results[name] for name in expected_metrics} == pytest.approx(
                expected_metrics, rel=1e-4, abs=1e-6
            )
        weights = whole_tensors(path, CASES[layout], role.local_weights(), value_head=True)
        rewards = role.map("score_pairs", batch).tensors
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=2e-5)
    with torch.no_grad():
        for name, half in zip(("chosen_rewards", "rejected_rewards"), zip(*sequences, strict=True), strict=True):
            torch.testing.assert_close(rewards[name], score(model, list(half)), rtol=0, atol=1e-4)
