"""Routing replay R2: routes of the pass for old log-probs travel with the samples and are used by the update."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import ProcessPool
from role_processes import ACTOR, MINI_BATCH_ROWS, Role, actor_arguments
from tiny_policies import Row, Token, actor_tokens, load_model, rows_of, save_model, train, training_batch

from megarl.config.schema.roles import RouterReplayConfig
from megarl.models import ParallelLayout
from megarl.workers.actor import ActorWorker

COUNT, PER_TOKEN = 4, 2
REPLAY = replace(ACTOR, router_replay=RouterReplayConfig(mode="R2"))


@pytest.mark.parametrize("layout", [ParallelLayout(pp=2), ParallelLayout(dp=2, ep=2)], ids=str)
def test_update_uses_the_experts_of_the_samples(role_pool: ProcessPool, tmp_path: Path, layout: ParallelLayout) -> None:
    save_model(
        tmp_path, "qwen3_moe", num_experts=COUNT, num_experts_per_tok=PER_TOKEN, moe_intermediate_size=24,
        norm_topk_prob=True,
    )  # fmt: skip
    model = load_model(tmp_path)
    batch = training_batch(model, None)
    routers = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
    own: dict[Any, list[torch.Tensor]] = defaultdict(list)
    hooks = [router.register_forward_hook(lambda m, i, o: own[m].append(o[2])) for router in routers]
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
    trained = _train_with_routes(model, routers, batch, forced)
    for name, value in trained.items():
        assert metrics[f"actor/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def _key(row: Row) -> tuple[int, ...]:
    return tuple(torch.cat([row.prompt, row.response]).tolist())


def _train_with_routes(
    model: Any, routers: list[Any], batch: Any, forced: dict[tuple[int, ...], torch.Tensor]
) -> dict[str, float]:
    """Metrics of a plain loop over the tokens of the same mini-batches."""
    waiting: list[torch.Tensor] = []

    def force(module: Any, inputs: Any, outputs: Any) -> Any:
        chosen = waiting.pop(0)
        weights = outputs[0].softmax(-1).gather(1, chosen)
        return outputs[0], weights / weights.sum(-1, keepdim=True), chosen

    for router in routers:
        router.register_forward_hook(force)

    def tokens(model: Any, row: Row) -> list[Token]:
        waiting.extend(forced[_key(row)].unbind(1))
        return actor_tokens(model, row)

    return train(model, batch, tokens, "token-mean", MINI_BATCH_ROWS).metrics
