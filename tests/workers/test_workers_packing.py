"""With rows split by work, the model computes every real token once, and no other token."""

import pytest
import torch
from role_processes import ACTOR, LAYOUTS, Role, actor_arguments
from tiny_policies import (
    RESPONSE_WIDTH,
    ROW_LENGTHS,
    actor_tokens,
    load_model,
    policy_tokens,
    rectangle,
    rows_of,
    train,
)

from megarl.workers.actor import ActorWorker
from megarl.workers.settings import MicroBatchBudget, UpdatePlan

# Tokens per row: 8, 9, 8, 9, 8, 8, 8, 4. The first rank could do with one micro-batch of 24 tokens, the second cannot.
PLAN = [[0, 2, 4], [1, 3, 5, 6, 7]]


def test_ranks_with_different_rows_run_the_same_number_of_micro_batches(role_pool, models):
    layout, budget = LAYOUTS["dp2"], MicroBatchBudget(max_tokens=24)
    arguments = actor_arguments(models.policy_path, layout)
    arguments["plan"] = UpdatePlan(len(ROW_LENGTHS), 1, budget, "seq-mean-token-mean", RESPONSE_WIDTH)
    mask = models.batch.tensors["attention_mask"]
    with Role(role_pool, ActorWorker, layout, arguments) as actor:
        actor.count_tokens()
        results = actor.split("update_actor", models.batch, len(ROW_LENGTHS), plan=PLAN)
        counted = actor.counted_tokens()
        weights = actor.local_weights()
    assert [len(micro_batches) for micro_batches in counted] == [2, 2]
    assert [sum(tokens) for tokens in counted] == [int(mask[rows].sum()) for rows in PLAN]
    assert max(map(max, counted)) <= 24
    expected = train(
        load_model(models.policy_path), models.batch, actor_tokens, "seq-mean-token-mean", len(ROW_LENGTHS)
    )
    for metrics in results:
        assert metrics.pop("actor/kl_coef") == ACTOR.kl_loss_coef
        expected_metrics = {f"actor/{name}": value for name, value in expected.metrics.items()} | {
            "actor/skipped_steps": 0.0,
            "actor/empty_steps": 0.0,
        }
        assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    for name, ours in weights[0].items():
        assert torch.equal(ours, weights[1][name])


def test_equal_beginnings_are_computed_once_and_counted(role_pool, models):
    """Rows 2, 4 and 6 have one prompt and fork within their responses; row 7 is the beginning of row 0."""
    layout, plan = LAYOUTS["dp2"], [[0, 1, 7], [2, 3, 4, 5, 6]]
    responses = models.batch.tensors["responses"].clone()
    responses[4, :2], responses[7, :1] = responses[2, :2], responses[0, :1]
    responses[6, :3] = responses[4, :3]
    batch, model = models.batch.with_columns({"responses": responses}, {}), load_model(models.policy_path)
    with torch.no_grad():
        log_probs = rectangle([policy_tokens(model, row)[0] for row in rows_of(batch)])
    batch = batch.with_columns({"old_log_probs": log_probs - 0.1, "ref_log_prob": log_probs + 0.3}, {})
    nodes = []
    for rows in plan:
        of_rank = [rows_of(batch)[row] for row in rows]
        whole = [torch.cat([row.prompt, row.response]).tolist() for row in of_rank]
        nodes.append({tuple(ids[: end + 1]) for ids in whole for end in range(len(ids))})
    arguments = actor_arguments(models.policy_path, layout)
    budget = MicroBatchBudget(max_tokens=64, share_prompts=True)
    arguments["plan"] = UpdatePlan(len(ROW_LENGTHS), 1, budget, "token-mean", RESPONSE_WIDTH)
    with Role(role_pool, ActorWorker, layout, arguments) as actor:
        actor.count_tokens()
        results = actor.split("update_actor", batch, len(ROW_LENGTHS), plan=plan)
        counted = actor.counted_tokens()
        weights = actor.local_weights()
    assert counted == [[len(of_rank)] for of_rank in nodes] == [[17], [28]]
    expected = train(model, batch, actor_tokens, "token-mean", len(ROW_LENGTHS))
    expected_metrics = {f"actor/{name}": value for name, value in expected.metrics.items()} | {
        "actor/kl_coef": ACTOR.kl_loss_coef,
        "actor/skipped_steps": 0.0,
        "actor/empty_steps": 0.0,
        "perf/computed_tokens/actor": 45,
        "perf/sequence_tokens/actor": sum(map(sum, ROW_LENGTHS)),
    }
    for metrics in results:
        assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    for name, ours in weights[0].items():
        assert torch.equal(ours, weights[1][name])


@pytest.mark.parametrize("layout", ["tp1", "pp2"])
def test_log_probs_compute_real_tokens_only(role_pool, models, layout):
    with Role(role_pool, ActorWorker, LAYOUTS[layout], actor_arguments(models.policy_path, LAYOUTS[layout])) as actor:
        actor.count_tokens()
        actor.map("compute_log_prob", models.batch)
        counted = actor.counted_tokens()
    assert sum(counted[0]) == int(models.batch.tensors["attention_mask"].sum()) == sum(map(sum, ROW_LENGTHS))
    assert layout == "tp1" or not counted[1], "later stages are given hidden states"
