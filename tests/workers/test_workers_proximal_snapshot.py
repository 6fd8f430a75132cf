"""The proximal policy: log-probs of the weights at the start of a sync interval, while the actor goes on learning."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from role_processes import LAYOUTS, Role, actor_arguments, with_offload

from megarl.models import ParallelLayout
from megarl.models.adapters import LoraOptions
from megarl.workers.actor import ActorWorker

COLUMNS = ("old_log_probs", "entropys")


class Interval(NamedTuple):
    """Two updates of an interval: log-probs before each, metrics, and all ranks' weights afterwards."""

    log_probs: list[list[torch.Tensor]]
    metrics: list[dict[str, float]]
    weights: list[dict[str, torch.Tensor]]


def interval(actor, models):
    log_probs, metrics = [], []
    for _ in range(2):
        columns = actor.map("compute_log_prob", models.batch).tensors
        log_probs.append([columns[name] for name in COLUMNS])
        metrics.append(actor.update("update_actor", models.batch))
    return Interval(log_probs, metrics, actor.local_weights())


def is_equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def arguments_of(models, case):
    layout = ParallelLayout(tp=2, pp=2, dp=2) if case == "tp2pp2dp2" else LAYOUTS["dp2"]
    arguments = actor_arguments(models.policy_path, layout, reference=True)
    if case == "lora":
        lora = LoraOptions(rank=4, alpha=8)
        arguments["settings"] = replace(arguments["settings"], lora=lora)
    return layout, with_offload(arguments) if case == "offload" else arguments


@pytest.mark.parametrize("case", ["tp2pp2dp2", "offload", "lora"])
def test_held_weights_give_the_log_probs_before_the_first_update(role_pool, models, case):
    """Bit for bit; updates, weights and optimizer state are those of an actor that holds nothing."""
    layout, arguments = arguments_of(models, case)
    with Role(role_pool, ActorWorker, layout, arguments) as actor:
        plain = interval(actor, models)
        assert not is_equal(*plain.log_probs)
        actor.rebuild()
        actor.call("hold_weights")
        held = interval(actor, models)
        assert is_equal(held.log_probs[0], plain.log_probs[0]) and is_equal(*held.log_probs)
        assert held.metrics == plain.metrics
        for mine, other in zip(actor.local_weights(), plain.weights, strict=True):
            assert is_equal(mine.values(), other.values())


@pytest.mark.parametrize("case", ["offload", "lora"])
def test_a_new_interval_replaces_the_held_weights(role_pool, models, case):
    layout, arguments = arguments_of(models, case)
    with Role(role_pool, ActorWorker, layout, arguments) as actor:
        actor.call("hold_weights")
        first = actor.map("compute_log_prob", models.batch).tensors["old_log_probs"]
        actor.update("update_actor", models.batch)
        actor.call("hold_weights")
        renewed = actor.map("compute_log_prob", models.batch).tensors["old_log_probs"]
        actor.update("update_actor", models.batch)
        assert torch.equal(actor.map("compute_log_prob", models.batch).tensors["old_log_probs"], renewed)
        assert not torch.equal(renewed, first)
        actor.call("release_weights")
        assert not torch.equal(actor.map("compute_log_prob", models.batch).tensors["old_log_probs"], renewed)
