"""KTO in every layout: the KL, the loss and updates equal plain transformers and torch."""

import copy
from dataclasses import replace

import pytest
import torch
from role_processes import BUDGETS, LAYOUTS, Role, role_settings
from support.release import of_release
from support.whole_tensors import whole_tensors
from tiny_policies import VOCAB, adam_of, clipped_step, load_model

from megarl.config.schema.jobs import PreferenceLossConfig
from megarl.data import DataProto, attention_mask_of, pad_left, pad_right
from megarl.models import ParallelLayout
from megarl.workers.kto import KTOWorker

CASES = {**LAYOUTS, "tp2 pp2": ParallelLayout(tp=2, pp=2)}
NAMES = of_release(["cp2", "tp2 pp2"], ["dp2", "tp1", "tp2", "pp2"])
BETA, WEIGHTS = 0.3, {True: 1.2, False: 0.7}
Example = tuple[torch.Tensor, torch.Tensor, bool]


def examples(labels):
    """Eight responses of different lengths to different prompts; ``+`` is a desirable one."""
    generator = torch.Generator().manual_seed(4)
    lengths = [(4, 3), (1, 5), (3, 1), (6, 2), (1, 7), (5, 1), (2, 9), (4, 4)]
    made = [[torch.randint(1, VOCAB, (length,), generator=generator) for length in pair] for pair in lengths]
    return [(prompt, response, label == "+") for (prompt, response), label in zip(made, labels, strict=True)]


def batch_of(made):
    """The columns of the data set: a mismatched sequence has the response of the row before."""
    own = [torch.cat([prompt, response]).tolist() for prompt, response, _ in made]
    others = [torch.cat([made[row][0], made[row - 1][1]]).tolist() for row in range(len(made))]
    tensors = {"kto_sequence": pad_left(own), "kl_sequence": pad_right(others)}
    widths = (tensor.shape[1] for tensor in tensors.values())
    tensors["attention_mask"] = attention_mask_of([*map(len, own)], [*map(len, others)], *widths)
    for name in ("kto_sequence_prompt_tokens", "kl_sequence_prompt_tokens"):
        tensors[name] = torch.tensor([len(prompt) for prompt, *_ in made])
    tensors["desirable"] = torch.tensor([int(desirable) for *_, desirable in made])
    return DataProto.from_dict(tensors, {"index": range(len(made))})


def log_prob(model, prompt, response):
    """Log-prob of a response, one sequence at a time."""
    ids = torch.cat([prompt, response])
    rows = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return sum(rows[at - 1, ids[at]] for at in range(len(prompt), len(ids)))  # type: ignore[return-value]


def divergence(policy, reference, made):
    """KTO's estimate of the KL: prompts with the responses of the rows before, at least 0, without gradients."""
    with torch.no_grad():
        ratios = [
            log_prob(policy, made[row][0], made[row - 1][1]) - log_prob(reference, made[row][0], made[row - 1][1])
            for row in range(len(made))
        ]
    return max(0.0, sum(ratio.item() for ratio in ratios) / len(ratios))


def step_numbers(policy, reference, made):
    """The loss of a step by a loop over its responses (Ethayarajh et al. 2024), and its metrics."""
    kl = divergence(policy, reference, made)
    losses, rewards, correct = [], {True: [], False: []}, 0
    for prompt, response, desirable in made:
        with torch.no_grad():
            old = log_prob(reference, prompt, response)
        ratio = log_prob(policy, prompt, response) - old
        value = torch.sigmoid(BETA * (ratio - kl) if desirable else BETA * (kl - ratio))
        losses.append(WEIGHTS[desirable] * (1 - value))
        rewards[desirable].append(BETA * ratio.item())
        correct += value.item() > 0.5
    loss = sum(losses) / len(losses)
    numbers = {"loss": loss.item(), "kl": kl, "accuracy": correct / len(made)}
    means = {label: sum(values) / len(values) for label, values in rewards.items() if values}
    numbers |= {name: means[label] for name, label in (("chosen_reward", True), ("rejected_reward", False))
                if label in means}  # fmt: skip
    if len(means) == 2:
        numbers["margin"] = means[True] - means[False]
    return loss, numbers


def train(model, reference, made, steps):
    """Steps of torch's AdamW."""
    adam, results = adam_of(model), []
    for step in range(steps):
        loss, numbers = step_numbers(model, reference, made)
        adam.zero_grad()
        loss.backward()
        norm, lr = clipped_step(model, adam, step)
        results.append({**numbers, "grad_norm": norm, "lr": lr})
    return results


def worker_arguments(models, layout, budget):
    loss = PreferenceLossConfig(type="kto", beta=BETA, desirable_weight=1.2, undesirable_weight=0.7)
    return {"settings": role_settings(models.policy_path, layout), "budget": budget, "loss": loss}


@pytest.mark.parametrize(
    ("layout", "labels"), [*((name, "+--+-+--") for name in NAMES), ("dp2", "++++++++"), ("tp1", "--------")]
)
def test_updates_equal_plain_torch(role_pool, models, layout, labels):
    made = examples(labels)
    batch, model = batch_of(made), load_model(models.policy_path)
    initial = copy.deepcopy(model)
    expected = train(model, initial, made, steps=3)
    assert expected[0]["kl"] == pytest.approx(0, abs=1e-6)  # policy and reference are one model
    budget = BUDGETS["one row"] if layout == "tp1" else replace(BUDGETS["tokens"], max_tokens=40)
    with Role(role_pool, KTOWorker, CASES[layout], worker_arguments(models, CASES[layout], budget)) as role:
        for numbers in expected:
            metrics = role.update("update_preference", batch, len(batch))
            results = {name.removeprefix("train/"): value for name, value in metrics.items()}
            compared = set(numbers) - ({"accuracy"} if numbers is expected[0] else set())  # all values are one half
            assert {name: results[name] for name in compared} == pytest.approx(
                {name: numbers[name] for name in compared}, rel=1e-4, abs=2e-5
            )
            assert ("margin" in results) == (len(set(labels)) == 2)
        weights = whole_tensors(models.policy_path, CASES[layout], role.local_weights())
        columns = role.map("compute_response_log_probs", batch).tensors
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=2e-5)
    with torch.no_grad():
        for name, shift in (("log_ratios", 0), ("kl_log_ratios", 1)):
            ratios = [
                log_prob(model, made[row][0], made[row - shift][1])
                - log_prob(initial, made[row][0], made[row - shift][1])
                for row in range(len(made))
            ]
            assert columns[name].float() == pytest.approx(torch.stack(ratios), abs=2e-4)
    assert columns["desirable"].tolist() == [int(label == "+") for label in labels]


def test_kl_above_zero_is_a_constant_of_the_loss(role_pool, models):
    """After updates that raise all likelihoods the KL is positive, and gradients are still those of the loop."""
    made = examples("++++++++")
    model = load_model(models.policy_path)
    expected = train(model, copy.deepcopy(model), made, steps=3)
    assert expected[2]["kl"] > 1e-3
    results = {}
    for layout in ("tp1", "dp2"):
        for budget in ("one row", "all rows"):
            arguments = worker_arguments(models, LAYOUTS[layout], BUDGETS[budget])
            with Role(role_pool, KTOWorker, LAYOUTS[layout], arguments) as role:
                for _ in range(3):
                    metrics = role.update("update_preference", batch_of(made), len(made))
                results[layout, budget] = [metrics[f"train/{name}"] for name in ("loss", "kl", "grad_norm")]
    reference = [expected[2][name] for name in ("loss", "kl", "grad_norm")]
    for name, numbers in results.items():
        assert numbers == pytest.approx(reference, rel=1e-4), name


def test_mismatched_sequences_are_not_in_the_update(role_pool, models):
    """Passes: both sequences under the reference, the mismatched under the policy, and the own with gradients."""
    made = examples("+-+-+-+-")
    own = sum(len(prompt) + len(response) for prompt, response, _ in made)
    prompts = sum(len(prompt) for prompt, *_ in made)
    arguments = worker_arguments(models, ParallelLayout(), BUDGETS["all rows"])
    with Role(role_pool, KTOWorker, ParallelLayout(), arguments) as role:
        role.count_tokens()
        role.update("update_preference", batch_of(made), len(made))
        assert role.counted_tokens() == [[2 * own - prompts, own, own]]
