"""Outputs of the roles equal Hugging Face in every layout."""

from dataclasses import replace

import pytest
import torch
from role_processes import CRITIC, LAYOUTS, Role, actor_arguments, log_prob_settings, role_settings, update_plan
from tiny_policies import PROMPT_WIDTH, TEMPERATURE, policy_tokens, rectangle, rows_of, value_tokens

from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker
from megarl.workers.frozen import ReferenceWorker


@pytest.mark.parametrize("layout", LAYOUTS)
def test_actor(role_pool, models, layout):
    expected = [policy_tokens(models.policy, row) for row in rows_of(models.batch)]
    with Role(role_pool, ActorWorker, LAYOUTS[layout], actor_arguments(models.policy_path, LAYOUTS[layout])) as actor:
        result = actor.map("compute_log_prob", models.batch).tensors
    assert set(result) == {"old_log_probs", "entropys"}
    for name, index in (("old_log_probs", 0), ("entropys", 1)):
        theirs = rectangle([row[index].detach() for row in expected])
        assert (result[name] - theirs).abs().max() < 1e-5
        assert not result[name][models.batch.tensors["attention_mask"][:, PROMPT_WIDTH:] == 0].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_of_squared_probabilities(role_pool, models, layout):
    """The sums for optimal token baselines equal those of transformers' logits; the log-probs do not change."""
    arguments = actor_arguments(models.policy_path, LAYOUTS[layout])
    with Role(role_pool, ActorWorker, LAYOUTS[layout], arguments) as actor:
        plain = actor.map("compute_log_prob", models.batch).tensors
        actor.rebuild(log_prob=replace(arguments["log_prob"], sum_pi_squared=True))
        result = actor.map("compute_log_prob", models.batch).tensors
    assert set(result) == {"old_log_probs", "entropys", "sum_pi_squared"}
    assert all(torch.equal(result[name], plain[name]) for name in plain)
    sums = []
    for row in rows_of(models.batch):
        with torch.no_grad():
            logits = models.policy(torch.cat([row.prompt, row.response])[None]).logits[0, len(row.prompt) - 1 : -1]
        sums.append((logits / TEMPERATURE).softmax(-1).square().sum(-1))
    assert (result["sum_pi_squared"] - rectangle(sums)).abs().max() < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_critic(role_pool, models, layout):
    arguments = {
        "settings": role_settings(models.critic_path, LAYOUTS[layout]),
        "config": CRITIC,
        "plan": update_plan(budget="one row"),
    }
    with Role(role_pool, CriticWorker, LAYOUTS[layout], arguments) as critic:
        values = critic.map("compute_values", models.batch).tensors["values"]
    theirs = rectangle([value_tokens(models.critic, row).detach() for row in rows_of(models.batch)])
    assert (values - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_with_separate_processes(role_pool, models, layout):
    arguments = {
        "settings": role_settings(models.policy_path, LAYOUTS[layout], learns=False),
        "log_prob": log_prob_settings("all rows"),
    }
    theirs = rectangle([policy_tokens(models.policy, row)[0].detach() for row in rows_of(models.batch)])
    with Role(role_pool, ReferenceWorker, LAYOUTS[layout], arguments) as reference:
        ours = reference.map("compute_ref_log_prob", models.batch).tensors["ref_log_prob"]
        vectors = reference.map("compute_ref_representations", models.batch).tensors["representations"]
    assert (ours - theirs).abs().max() < 1e-5
    assert (vectors - mean_states(models)).abs().max() < 1e-5


def mean_states(models):
    """Mean of the last layer's states at each row's trained tokens, by transformers."""
    means = []
    for row in rows_of(models.batch):
        with torch.no_grad():
            tokens = torch.cat([row.prompt, row.response])[None]
            states = models.policy(tokens, output_hidden_states=True).hidden_states[-1][0, len(row.prompt) :]
        trained = states[row.mask.bool()]
        means.append(trained.mean(0) if len(trained) else torch.zeros(states.shape[1]))
    return torch.stack(means)


def test_fewer_rows_than_data_parallel_ranks(role_pool, models):
    """The idle rank computes a copy of a row; its result is not used twice."""
    layout, one = LAYOUTS["dp2"], models.batch[4]
    theirs = policy_tokens(models.policy, rows_of(one)[0])[0].detach()
    with Role(role_pool, ActorWorker, layout, actor_arguments(models.policy_path, layout)) as actor:
        ours = actor.map("compute_log_prob", one).tensors["old_log_probs"]
    assert ours.shape == (1, 8)
    assert (ours[0, : len(theirs)] - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_reference_inside_the_actor_stays_the_initial_policy(role_pool, models, layout):
    arguments = actor_arguments(models.policy_path, LAYOUTS[layout], reference=True)
    with Role(role_pool, ActorWorker, LAYOUTS[layout], arguments) as actor:
        before = actor.map("compute_ref_log_prob", models.batch).tensors["ref_log_prob"]
        vectors = actor.map("compute_ref_representations", models.batch).tensors["representations"]
        assert (vectors - mean_states(models)).abs().max() < 1e-5
        initial = actor.map("compute_log_prob", models.batch).tensors["old_log_probs"]
        actor.update("update_actor", models.batch)
        moved, weights = actor.map("compute_log_prob", models.batch).tensors["old_log_probs"], actor.local_weights()
        after = actor.map("compute_ref_log_prob", models.batch).tensors["ref_log_prob"]
        assert torch.equal(before, after)
        assert torch.equal(actor.map("compute_ref_representations", models.batch).tensors["representations"], vectors)
        # The two are computed in different micro-batches.
        assert (before - initial).abs().max() < 1e-5 and (moved - initial).abs().max() > 1e-3
        for rank, own in enumerate(actor.local_weights()):
            assert all(torch.equal(own[name], weights[rank][name]) for name in own)
        assert torch.equal(actor.map("compute_log_prob", models.batch).tensors["old_log_probs"], moved)
