"""Routing replay: routes of the pass for old log-probs (R2) or of the engine (R3) are used by the update."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from role_processes import ACTOR, MINI_BATCH_ROWS, Role, actor_arguments, log_prob_settings, update_plan
from support.release import of_release
from tiny_policies import (
    PAD,
    TEMPERATURE,
    actor_tokens,
    load_model,
    policy_tokens,
    rows_of,
    save_model,
    train,
    training_batch,
)
from torch import Tensor

from megarl.agents.trajectories import trajectories_to_batch
from megarl.agents.types import Trajectory
from megarl.config.schema.roles import RouterReplayConfig
from megarl.data import DataProto
from megarl.models import ParallelLayout
from megarl.rollout import EngineOptions, Request, SamplingParams, create_engine
from megarl.workers.actor import ActorWorker

COUNT, PER_TOKEN = 4, 2
REPLAY, REPLAY_ENGINE = (replace(ACTOR, router_replay=RouterReplayConfig(mode=mode)) for mode in ("R2", "R3"))
EXPERTS = {"num_experts_per_tok": PER_TOKEN, "moe_intermediate_size": 24, "norm_topk_prob": True}


@pytest.mark.parametrize("layout", [ParallelLayout(pp=2), ParallelLayout(dp=2, ep=2)], ids=str)
def test_update_uses_the_experts_of_the_samples(role_pool, tmp_path, layout):
    save_model(tmp_path, "qwen3_moe", num_experts=COUNT, **EXPERTS)
    model = load_model(tmp_path)
    batch = training_batch(model, None)
    own: dict[Any, list[Tensor]] = defaultdict(list)
    hooks = [router.register_forward_hook(lambda m, i, o: own[m].append(o[2])) for router in _routers(model)]
    with torch.no_grad():
        for row in rows_of(batch):
            model(torch.cat([row.prompt, row.response])[None])
    for hook in hooks:
        hook.remove()
    arguments = actor_arguments(tmp_path, layout) | {"config": REPLAY}
    with Role(role_pool, ActorWorker, layout, arguments) as actor:
        routes = actor.map("compute_log_prob", batch).tensors["routed_experts"]
        for error in actor.split("update_actor", batch, MINI_BATCH_ROWS, attempt=True):
            assert error.kind == "DataError" and "router_replay.mode=R2: the batch has no routed_experts" in error.text
        real = batch.tensors["attention_mask"].bool()
        expected = torch.cat([torch.stack(layers, dim=1) for layers in zip(*own.values(), strict=True)])
        assert torch.equal(routes[real].long().sort(-1).values, expected.sort(-1).values)
        assert (routes[~real] == -1).all()
        others = torch.where(routes < 0, routes, (routes + 1) % COUNT)  # no model selects these
        metrics = actor.update("update_actor", batch.with_columns({"routed_experts": others}, {}))
    forced = {_key(row): others[index][real[index]].long() for index, row in enumerate(rows_of(batch))}
    trained = _train_with_routes(model, batch, _force_routes(model, forced))
    for name, value in trained.items():
        assert metrics[f"actor/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6), name


class Rollout(NamedTuple):
    """Samples of a bfloat16 engine, which selects other experts than the float32 actor for some tokens."""

    path: Path
    batch: DataProto
    without_replay: Tensor
    """Difference to transformers' log-probs of the response tokens, in float32."""


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture")
    save_model(path, "qwen3_moe", num_experts=8, num_hidden_layers=4, **EXPERTS)
    engine = create_engine("embedded", str(path), EngineOptions(dtype="bfloat16", return_routes=True))
    engine.load_hf(str(path))
    requests = [
        Request(
            f"r{i}",
            [7 * i % 29 + 1] * (1 + i % 4),
            SamplingParams(6 + i % 7, TEMPERATURE, ignore_eos=True),
            i,
            routes_from=0,
        )
        for i in range(16)
    ]
    samples = [
        Trajectory(
            request.prompt_ids, end.token_ids, [1] * len(end.token_ids), end.log_probs, "length", 2, routes=end.routes
        )
        for request, end in zip(requests, engine.generate(requests), strict=True)
    ]
    batch, model = trajectories_to_batch(samples, PAD, with_routes=True), load_model(path)
    with torch.no_grad():
        rows = [policy_tokens(model, row)[0] - row.columns["rollout_log_probs"] for row in rows_of(batch)]
    return Rollout(path, batch, torch.cat(rows).abs())


LAYOUTS = of_release(
    [ParallelLayout(cp=2), ParallelLayout(pp=2, vpp=2), ParallelLayout(tp=2, ep=2, etp=1)],
    [ParallelLayout(tp=2), ParallelLayout(dp=2, ep=2)],
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=ParallelLayout.describe)
def test_old_log_probs_and_update_use_the_experts_of_the_engine(role_pool, rollout, layout):
    batch, generator = rollout.batch, torch.Generator().manual_seed(0)
    budget = "one row" if layout.vpp > 1 else "tokens"  # the interleaved schedule needs an even number
    passes = {"plan": update_plan(budget=budget), "log_prob": log_prob_settings(budget)}
    arguments = actor_arguments(rollout.path, layout) | passes | {"config": REPLAY_ENGINE}
    with Role(role_pool, ActorWorker, layout, arguments) as actor:
        without_routes = batch.select([name for name in batch.tensors if name != "routed_experts"])
        for error in actor.split("compute_log_prob", without_routes, attempt=True):
            assert error.kind == "DataError" and "router_replay.mode=R3: the batch has no routed_experts" in error.text
        old = actor.map("compute_log_prob", batch).tensors["old_log_probs"]
        noise = {name: torch.randn(old.shape, generator=generator) for name in ("old_log_probs", "ref_log_prob")}
        columns = {name: old + 0.3 * values for name, values in noise.items()}
        columns["advantages"] = torch.randn(old.shape, generator=generator)
        batch = batch.with_columns({name: column * (old != 0) for name, column in columns.items()}, {})
        metrics = actor.update("update_actor", batch)

    real, routes = batch.tensors["attention_mask"].bool(), batch.tensors["routed_experts"].long()
    forced = {_key(row): routes[index][real[index]] for index, row in enumerate(rows_of(batch))}
    for experts in forced.values():
        assert (experts[:-1] >= 0).all() and (experts[-1] == -1).all()
        experts[-1] = torch.arange(PER_TOKEN)  # of the last token, which no output depends on
    model = load_model(rollout.path)
    announce = _force_routes(model, forced)
    for row, log_probs in zip(rows_of(batch), old, strict=True):
        announce(row)
        with torch.no_grad():
            expected = policy_tokens(model, row)[0]
        assert log_probs[: len(expected)] == pytest.approx(expected, abs=1e-5)

    # A dense model of this size differs by 0.04, by rounding only.
    difference = (old - batch.tensors["rollout_log_probs"]).abs().max()
    assert difference < 0.1 < 0.5 < rollout.without_replay.max()
    for name, value in _train_with_routes(model, batch, announce).items():
        assert metrics[f"actor/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def _key(row):
    return tuple(torch.cat([row.prompt, row.response]).tolist())


def _force_routes(model, forced):
    """Replace the choice of experts; the result announces the row of the next forward pass."""
    waiting: list[Tensor] = []

    def force(module, inputs, outputs):
        chosen = waiting.pop(0)
        weights = outputs[0].softmax(-1).gather(1, chosen)
        return outputs[0], weights / weights.sum(-1, keepdim=True), chosen

    for router in _routers(model):
        router.register_forward_hook(force)
    return lambda row: waiting.extend(forced[_key(row)].unbind(1))


def _train_with_routes(model, batch, announce):
    """Metrics of a plain loop over the tokens of the same mini-batches."""

    def tokens(model, row):
        announce(row)
        return actor_tokens(model, row)

    return train(model, batch, tokens, "token-mean", MINI_BATCH_ROWS).metrics


def _routers(model):
    return [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
