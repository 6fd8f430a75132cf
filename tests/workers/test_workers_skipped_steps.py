"""A non-finite loss or gradient on one rank skips the step on all; too many skips raise."""

import math

import pytest
import torch
from role_processes import LAYOUTS, Raised, Role, actor_arguments
from support.release import of_release
from tiny_policies import LR, RESPONSE_WIDTH, WARMUP, rows_of

from megarl.cluster.partition import partition_costs, row_costs
from megarl.workers.actor import ActorWorker


def poisoned(batch, row, value):
    """The batch with another advantage on one row's first token."""
    advantages = batch.tensors["advantages"].clone()
    advantages[row, 0] = value
    return batch.with_columns({"advantages": advantages}, {})


def start(pool, models, layout, allowed):
    arguments = actor_arguments(models.policy_path, LAYOUTS[layout], max_skipped_steps=allowed)
    return Role(pool, ActorWorker, LAYOUTS[layout], arguments)


def same(left, right):
    return all(torch.equal(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in a)


# 1e30 leaves the loss finite; the gradient's norm is not.
@pytest.mark.parametrize(
    ("layout", "value"),
    of_release(
        [("tp2", math.nan), ("pp2", math.inf), ("dp2", 1e30)],
        [("tp2", math.inf), ("tp2", 1e30), ("pp2", math.nan), ("pp2", 1e30), ("dp2", math.nan), ("dp2", math.inf)],
    ),
)
def test_all_ranks_skip_together(role_pool, models, layout, value):
    bad, good = poisoned(models.batch, 1, value)[:4], models.batch[:4]
    ranks_with_it = sum(1 in rows for rows in partition_costs(row_costs(bad), LAYOUTS[layout].dp, 4, equal=True).rows)
    assert ranks_with_it == 1
    with start(role_pool, models, layout, allowed=3) as actor:
        before = actor.local_weights()
        metrics = actor.update("update_actor", bad)
        assert metrics["actor/skipped_steps"] == 1
        assert not math.isfinite(metrics["actor/grad_norm"])
        assert same(before, actor.local_weights())
        assert actor.next_lr() == pytest.approx(LR / WARMUP)

        # Nothing of the bad step is left: the next one is the first.
        after = actor.update("update_actor", good)
        weights = actor.local_weights()
        actor.rebuild()
        untouched = actor.update("update_actor", good)
        assert after == untouched and after["actor/skipped_steps"] == 0 and math.isfinite(after["actor/grad_norm"])
        assert same(weights, actor.local_weights())


def test_one_bad_mini_batch_of_two(role_pool, models):
    """The good mini-batch trains at the learning rate of the first step, in either order."""
    with start(role_pool, models, "dp2", allowed=3) as actor:
        metrics = actor.update("update_actor", poisoned(models.batch, 1, math.nan))
        assert metrics["actor/skipped_steps"] == 1 and metrics["actor/lr"] == pytest.approx(LR / WARMUP)
        weights = actor.local_weights()
        actor.rebuild()
        actor.update("update_actor", models.batch[4:])
        assert same(weights, actor.local_weights())
        actor.rebuild()
        actor.update("update_actor", poisoned(models.batch, 6, math.nan))
        weights = actor.local_weights()
        actor.rebuild()
        actor.update("update_actor", models.batch[:4])
        assert same(weights, actor.local_weights())


def test_too_many_consecutive_skips_raise_with_their_reports(role_pool, models, tmp_path):
    named = models.batch.with_columns({}, {"uid": [f"prompt-{row}" for row in range(8)], "index": list(range(40, 48))})
    bad, good = poisoned(named, 1, math.nan)[:4], named[:4]
    with start(role_pool, models, "dp2", allowed=2) as actor:
        for batch, skipped in ((bad, 1), (bad, 1), (good, 0), (bad, 1), (bad, 1)):
            assert actor.update("update_actor", batch)["actor/skipped_steps"] == skipped
        actor.call("save_checkpoint", str(tmp_path / "actor"))
        actor.call("finish_checkpoint")
        other = poisoned(poisoned(named, 0, math.inf), 3, 1e30)[:4]
        (text,) = stopped(actor, other)
        assert "optim.max_skipped_steps=2" in text and "3 optimizer steps in a row" in text
        first, second, third = text.splitlines()[1:]
        for line in (first, second):
            assert "not finite for 1 samples: uid=prompt-1 index=41 (gradient of its log-probs" in line
        assert "1 samples: uid=prompt-0 index=40" in third
        # With a bad loss every parameter has a bad gradient; the output layer's is the first.
        assert all("'output_layer.weight' is not finite on rank" in line for line in (first, second, third))

        # The count is a part of the checkpoint.
        actor.rebuild()
        actor.call("load_checkpoint", str(tmp_path / "actor"))
        (text,) = stopped(actor, poisoned(named, 3, 1e30)[:4])
        # A finite gradient whose norm is not: the sample with the largest is named.
        assert "3 optimizer steps in a row" in text and "is that of uid=prompt-3 index=43" in text


def stopped(actor, batch):
    """Error of an update with too many skipped steps; all ranks the same."""
    results = actor.split("update_actor", batch, 4, attempt=True)
    assert all(isinstance(result, Raised) and result.kind == "SkippedStepsError" for result in results)
    return {result.text for result in results}


def test_limit_zero_allows_no_skip(role_pool, models):
    with start(role_pool, models, "tp2", allowed=0) as actor:
        results = actor.split("update_actor", poisoned(models.batch, 6, math.nan), 4, attempt=True)
        assert [result.kind for result in results] == ["SkippedStepsError"] * 2


def test_a_batch_without_a_trained_token_has_no_gradient(role_pool, models):
    """The loss is zero, not 0 / 0, for example if every reward of a mini-batch failed."""
    masked = models.batch.with_columns({"response_mask": torch.zeros(8, RESPONSE_WIDTH, dtype=torch.int64)}, {})[:4]
    assert not any(row.mask.any() for row in rows_of(masked))
    with start(role_pool, models, "dp2", allowed=0) as actor:
        metrics = actor.update("update_actor", masked)
    assert (metrics["actor/skipped_steps"], metrics["actor/empty_steps"]) == (0, 1)
    assert metrics["actor/loss"] == metrics["actor/grad_norm"] == 0
