"""Preference optimization in every layout: log-probs and updates equal plain transformers and torch."""

import copy
import math
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
from megarl.workers.preference import PreferenceWorker

CASES = {**LAYOUTS, "tp2 pp2": ParallelLayout(tp=2, pp=2)}
NAMES = of_release(["cp2", "dp2", "tp2 pp2"], ["tp1", "tp2", "pp2"])
BETA, GAMMA = 0.3, 0.4
Pair = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def pairs():
    """Eight pairs of responses of different lengths to one prompt each."""
    generator = torch.Generator().manual_seed(4)

    def draw(length):
        return torch.randint(1, VOCAB, (length,), generator=generator)

    lengths = [(4, 3, 2), (1, 5, 6), (3, 1, 4), (6, 2, 2), (1, 7, 1), (5, 1, 1), (2, 2, 9), (4, 4, 4)]
    made = [(draw(prompt), draw(chosen), draw(rejected)) for prompt, chosen, rejected in lengths]
    sequences = [[torch.cat([prompt, answer]).tolist() for answer in answers] for prompt, *answers in made]
    chosen, rejected = ([pair[half] for pair in sequences] for half in (0, 1))
    tensors = {"chosen": pad_left(chosen), "rejected": pad_right(rejected)}
    widths = (tensor.shape[1] for tensor in tensors.values())
    tensors["attention_mask"] = attention_mask_of([*map(len, chosen)], [*map(len, rejected)], *widths)
    for name in ("chosen_prompt_tokens", "rejected_prompt_tokens"):
        tensors[name] = torch.tensor([len(prompt) for prompt, *_ in made])
    return DataProto.from_dict(tensors, {"index": range(len(made))}), made


def response_log_prob(model, prompt, response):
    """Log-prob of a response, one sequence at a time."""
    ids = torch.cat([prompt, response])
    rows = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return sum(rows[at - 1, ids[at]] for at in range(len(prompt), len(ids)))  # type: ignore[return-value]


def pair_loss(kind, policy, reference, pair):
    prompt, chosen, rejected = pair
    p = [response_log_prob(policy, prompt, response) for response in (chosen, rejected)]
    if kind == "simpo":
        return -torch.nn.functional.logsigmoid(BETA * (p[0] / len(chosen) - p[1] / len(rejected)) - GAMMA)
    with torch.no_grad():
        q = [response_log_prob(reference, prompt, response) for response in (chosen, rejected)]
    return -torch.nn.functional.logsigmoid(BETA * ((p[0] - q[0]) - (p[1] - q[1])))


def train(kind, model, made, steps):
    """Steps of torch's AdamW on the mean over the pairs."""
    reference = copy.deepcopy(model)
    adam = adam_of(model)
    results = []
    for step in range(steps):
        loss = sum(pair_loss(kind, model, reference, pair) for pair in made) / len(made)
        adam.zero_grad()
        loss.backward()
        norm, lr = clipped_step(model, adam, step)
        results.append({"loss": loss.item(), "grad_norm": norm, "lr": lr})
    return results


@pytest.mark.parametrize(("layout", "kind"), [*((name, "dpo") for name in NAMES), ("pp2", "simpo")])
def test_updates_equal_plain_torch(role_pool, models, layout, kind):
    batch, made = pairs()
    model = load_model(models.policy_path)
    expected = train(kind, model, made, steps=2)
    arguments = {
        "settings": role_settings(models.policy_path, CASES[layout]),
        "budget": BUDGETS["one row"] if layout == "tp1" else replace(BUDGETS["tokens"], max_tokens=32),
        "loss": PreferenceLossConfig(type=kind, beta=BETA, simpo_gamma=GAMMA),
    }
    with Role(role_pool, PreferenceWorker, CASES[layout], arguments) as role:
        for step, numbers in enumerate(expected):
            metrics = role.update("update_preference", batch, len(batch))
            results = {name.removeprefix("train/"): value for name, value in metrics.items()}
            assert {name: results[name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-6)
            if kind == "dpo" and step == 0:  # policy and reference are one model
                assert results["loss"] == pytest.approx(math.log(2)) and results["margin"] == pytest.approx(0, abs=1e-5)
        weights = whole_tensors(models.policy_path, CASES[layout], role.local_weights())
        columns = role.map("compute_pair_log_probs", batch).tensors
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=2e-5)
    initial = load_model(models.policy_path)
    networks = {"": model} | ({"ref_": initial} if kind == "dpo" else {})
    assert ("ref_chosen_log_prob" in columns) == (kind == "dpo")
    with torch.no_grad():
        for prefix, network in networks.items():
            for half, name in enumerate(("chosen", "rejected"), start=1):
                log_probs = torch.stack([response_log_prob(network, pair[0], pair[half]) for pair in made])
                assert columns[f"{prefix}{name}_log_prob"].float() == pytest.approx(log_probs, abs=2e-4)
    assert columns["rejected_tokens"].tolist() == [len(pair[2]) for pair in made]


def test_common_prompt_is_computed_once(role_pool, models):
    batch, made = pairs()
    arguments = {
        "settings": role_settings(models.policy_path, ParallelLayout(), learns=False),
        "budget": BUDGETS["all rows"],
        "loss": PreferenceLossConfig(type="simpo"),
    }
    with Role(role_pool, PreferenceWorker, ParallelLayout(), arguments) as role:
        role.count_tokens()
        role.map("compute_pair_log_probs", batch)
        whole = [[*pair[0].tolist(), *response.tolist()] for pair in made for response in pair[1:]]
        once = {tuple(ids[: end + 1]) for ids in whole for end in range(len(ids))}
        assert role.counted_tokens() == [[len(once)]] and len(once) < sum(map(len, whole))
