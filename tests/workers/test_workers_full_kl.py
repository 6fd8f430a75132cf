"""The KL over the whole vocabulary, in the loss and for the reward, equals transformers in any layout."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from role_processes import LAYOUTS, MINI_BATCH_ROWS, Role, actor_arguments
from safetensors.torch import load_file
from support.release import of_release
from tiny_policies import TEMPERATURE, Token, load_model, policy_tokens, rectangle, rows_of, train
from transformers import AutoModelForCausalLM

from megarl.config import ActorConfig
from megarl.config.schema.roles import PolicyLossConfig
from megarl.workers.actor import ActorWorker

COEFFICIENT = 3.0
FULL = ActorConfig(
    policy_loss=PolicyLossConfig(loss_mode="reinforce"),
    use_kl_loss=True,
    kl_loss_coef=COEFFICIENT,
    kl_loss_type="full",
)


def full_kl(model, reference, row):
    """``KL(model || reference)`` at each of a row's response tokens, differentiable."""
    log_p, log_q = (
        (
            one(torch.cat([row.prompt, row.response])[None]).logits[0, len(row.prompt) - 1 : -1] / TEMPERATURE
        ).log_softmax(-1)
        for one in (model, reference)
    )
    return (log_p.exp() * (log_p - log_q.detach())).sum(-1)


@pytest.fixture(scope="module")
def expected(models):
    """Two steps: in the first the policy equals the reference, in the second it differs."""
    model = load_model(models.policy_path)
    reference = copy.deepcopy(model)

    def tokens(model, row):
        log_probs, kl = policy_tokens(model, row)[0], full_kl(model, reference, row)
        result: list[Token] = []
        for t, old in enumerate(row.columns["old_log_probs"].tolist()):
            gain = -row.columns["advantages"][t].item() * log_probs[t]
            token_means = {"ppo_kl": old - log_probs[t].item()}
            result.append((gain + COEFFICIENT * kl[t], {"pg_loss": gain, "kl_loss": kl[t]}, token_means))
        return result

    return train(model, models.batch, tokens, "token-mean", MINI_BATCH_ROWS)


@pytest.mark.parametrize("layout", of_release(["tp2", "cp2", "pp2"], ["tp1", "dp2"]))
def test_full_kl_in_loss_and_reward(role_pool, models, expected, tmp_path, layout):
    shape = LAYOUTS[layout]
    arguments = actor_arguments(models.policy_path, shape, reference=True) | {"config": FULL}
    arguments["reference"] = replace(arguments["reference"], full_kl=True)
    with Role(role_pool, ActorWorker, shape, arguments) as actor:
        before = actor.map("compute_ref_log_prob", models.batch).tensors["ref_kl"]
        metrics = actor.update("update_actor", models.batch)
        after = actor.map("compute_ref_log_prob", models.batch).tensors["ref_kl"]
        actor.call("export_hf", str(tmp_path / "hf"))
    assert before.abs().max() < 1e-6
    expected_metrics = {f"actor/{name}": value for name, value in expected.metrics.items()}
    assert expected_metrics["actor/kl_loss"] > 1e-4
    extra = {"actor/skipped_steps": 0.0, "actor/empty_steps": 0.0, "actor/kl_coef": COEFFICIENT}
    assert metrics == pytest.approx(expected_metrics | extra, rel=1e-5, abs=1e-6)
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    ours = load_file(file)
    for name, theirs in expected.weights.items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        theirs = rectangle([full_kl(trained, models.policy, row) for row in rows_of(models.batch)])
    assert theirs.max() > 1e-3 and (after - theirs).abs().max() < 1e-5
