"""Routing replay, losses that balance experts and expert loads equal a plain loop over transformers in every layout."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from engine_cases import Setup, assemble, engine, policy_loss
from family_cases import EXPERTS, MODELS, in_checkpoint_names
from tiny_models import TEMPERATURE, policy_reference, rows, save_model
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from megarl.megatron import OptimizerOptions, OutputOptions, PackedMicroBatch, RecomputeOptions
from megarl.megatron.layers.moe import ExpertRouter
from megarl.models import ParallelLayout
from tests.megatron.test_megatron_families import check_gradients

PER_TOKEN, COUNT = 2, 4
QWEN: dict[str, Any] = {
    "family": "qwen3_moe",
    "num_experts": COUNT,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "mlp_only_layers": [1],  # the index of an expert layer differs from the layer's
    **EXPERTS,
}
AUX, Z = 0.3, 0.02
BALANCE = (("moe_router_load_balancing_type", "seq_aux_loss"), ("moe_aux_loss_coeff", AUX), ("moe_z_loss_coeff", Z))
PLAIN_SGD = OptimizerOptions(use_distributed_optimizer=False)
SELECTIVE = RecomputeOptions(granularity="selective", modules=("moe",))
SETUPS = {
    "one-rank-full-recompute-shared": Setup(ParallelLayout(), recompute=RecomputeOptions()),
    "tp2ep2-moe-recompute-shared": Setup(ParallelLayout(tp=2, ep=2, etp=1), recompute=SELECTIVE),
    "cp2ep2-full-recompute": Setup(ParallelLayout(cp=2, ep=2), recompute=RecomputeOptions()),
    "tp2cp2": Setup(ParallelLayout(tp=2, cp=2)),
    "pp2vpp2-block-recompute": Setup(ParallelLayout(pp=2, vpp=2), recompute=RecomputeOptions(method="block")),
    "pp2ep2dp2-moe-recompute": Setup(ParallelLayout(pp=2, dp=2, ep=2), recompute=SELECTIVE),
}


class Replay(NamedTuple):
    """Results of one pass with forced experts; ``recorded`` are routes of an earlier pass, by row."""

    recorded: list[Tensor]
    metrics: dict[str, float]
    grads: dict[str, Tensor]


def sibling_rows():
    """Rows of which two pairs share a prompt."""
    result = rows()
    for first, second in ((0, 1), (4, 5)):
        result[second] = result[second]._replace(prompt=result[first].prompt)
    return result


def routers_of(model):
    return [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]


def own_routes(model, sequences):
    """Experts that transformers selects: ``[tokens, expert layers, per token]`` of each sequence."""
    chosen: dict[Any, list[Tensor]] = defaultdict(list)
    hooks = [r.register_forward_hook(lambda m, i, o: chosen[m].append(o[2])) for r in routers_of(model)]
    with torch.no_grad():
        for row in sequences:
            model(torch.cat([row.prompt, row.response])[None])
    for hook in hooks:
        hook.remove()
    return [torch.stack(layers, dim=1) for layers in zip(*(chosen[r] for r in routers_of(model)), strict=True)]


def plain_loop(model, sequences, routes):
    """Transformers sequence by sequence with forced experts, and the losses of its router logits."""
    logits: list[Tensor] = []
    forced: list[Tensor] = []

    def force(module, inputs, outputs):
        chosen = forced.pop(0)
        logits.append(outputs[0])
        weights = outputs[0].softmax(-1).gather(1, chosen)
        return outputs[0], weights / weights.sum(-1, keepdim=True), chosen

    hooks = [router.register_forward_hook(force) for router in routers_of(model)]
    tokens = sum(len(row.prompt) + len(row.response) for row in sequences)
    metrics = {"nll": 0.0, "entropy": 0.0, "seq_load_balancing_loss": 0.0, "z_loss": 0.0}
    loss, layers = torch.zeros(()), len(routers_of(model))
    for row, route in zip(sequences, routes, strict=True):
        forced += route.unbind(1)
        log_probs, entropy = policy_reference(model, row)
        nll, bonus = -(log_probs * row.weights).sum(), (entropy * row.weights).sum()
        # transformers leaves out the division by the number of experts per token
        aux = sum(load_balancing_loss_func((each,), COUNT, PER_TOKEN) / PER_TOKEN for each in logits) / len(sequences)
        z_loss = sum(each.logsumexp(-1).square().sum() for each in logits) / tokens
        loss = loss + nll - 0.3 * bonus + AUX * aux + Z * z_loss
        parts = {"nll": nll, "entropy": bonus, "seq_load_balancing_loss": aux / layers, "z_loss": z_loss / layers}
        metrics = {name: metrics[name] + parts[name].item() for name in metrics}
        logits.clear()
    loss.backward()
    for hook in hooks:
        hook.remove()
    load = torch.cat(routes).transpose(0, 1).flatten(1)
    for layer, chosen in enumerate(load):
        counts = chosen.bincount(minlength=COUNT).double()
        metrics[f"expert_load/max_over_mean/layer_{layer}"] = (counts.max() / counts.mean()).item()
        metrics[f"expert_load/dead/layer_{layer}"] = (counts == 0).sum().item()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return Replay([], metrics, in_checkpoint_names(grads, "qwen3_moe"))


def packed(sequences, share, routes, size):
    return [
        PackedMicroBatch.from_rows(
            [(row.prompt, row.response) for row in sequences[start : start + size]],
            {"weights": torch.cat([row.weights for row in sequences[start : start + size]])},
            share_prompts=share,
            routes=None if routes is None else routes[start : start + size],
        )
        for start in range(0, len(sequences), size)
    ]


def replay(place, folders, setup, routes, share):
    """Record the routes of the first folder's model, then train the second's with ``routes``."""
    with engine(place, folders[0], setup) as built:
        dp, where = setup.layout.dp, built.runtime.coordinate.dp
        mine = sibling_rows()[where::dp]
        options = OutputOptions(temperature=TEMPERATURE, with_entropy=True)
        outputs = built.forward(packed(mine, share, None, 2), options._replace(record_routes=True)) or []
        built.load_hf(folders[1])
        metrics = built.forward_backward(packed(mine, share, routes[where::dp], 2), policy_loss, options)
        grads = {name: param.main_grad.clone() for name, param in built.weights.parameters().items()}
        return Replay([each for output in outputs for each in output.routes], metrics, grads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model and the same model with other routers; routes of the first, and the second's results with them."""
    before, after = (tmp_path_factory.mktemp(name) for name in ("before", "after"))
    model = save_model(before, **QWEN)
    routes = own_routes(model, sibling_rows())
    with torch.no_grad():
        for router in routers_of(model):
            router.weight.add_(0.3 * torch.randn_like(router.weight))
    model.save_pretrained(after)
    changed = torch.cat([(a != b).flatten() for a, b in zip(routes, own_routes(model, sibling_rows()), strict=True)])
    assert changed.float().mean() > 0.2
    return (before, after), routes, plain_loop(model, sibling_rows(), routes)


@pytest.mark.parametrize("name", SETUPS)
def test_replayed_update_equals_a_plain_loop_with_forced_experts(pool, folders, name):
    paths, routes, expected = folders
    setup = SETUPS[name]._replace(optimizer=PLAIN_SGD, transformer=BALANCE)
    layout = setup.layout
    results = pool.run(replay, layout.world_size, paths, setup, routes, name.endswith("shared"))
    for rank, result in enumerate(results):
        assert {name: result.metrics[name] for name in expected.metrics} == pytest.approx(expected.metrics, rel=1e-5)
        where = layout.coordinate(rank)
        if where.pp == layout.pp - 1:
            mine = range(where.dp, len(routes), layout.dp)
            for ours, row in zip(result.recorded, mine, strict=True):
                assert torch.equal(ours.long().sort(-1).values, routes[row].sort(-1).values)
    check_gradients(assemble(paths[1], setup, [result.grads for result in results]), expected.grads)


def biases_after_a_step(place, path, setup):
    """Changes of the correction bias of each expert layer of this rank, and its own routing of the same step."""
    with engine(place, path, setup) as built:
        routers = [m for chunk in built.chunks for m in chunk.modules() if isinstance(m, ExpertRouter)]
        before = [router.expert_bias.clone() for router in routers]
        chosen: dict[Any, Tensor] = {r: torch.zeros(8) for r in routers}
        for router in routers:
            router.register_forward_hook(lambda m, i, o: chosen.update({m: chosen[m] + o[1].sum(0)}))
        mine = packed(rows()[built.runtime.coordinate.dp :: setup.layout.dp], False, None, 2)
        options = OutputOptions(temperature=TEMPERATURE, with_entropy=True)
        metrics = built.forward_backward(mine, policy_loss, options)
        built.optimizer_step()
        changes = [router.expert_bias - old for router, old in zip(routers, before, strict=True)]
        return changes, list(chosen.values()), metrics


def test_correction_bias_moves_towards_an_even_load(pool, tmp_path):
    save_model(tmp_path, **{**MODELS["deepseek_v3"], "num_hidden_layers": 3})
    setup = Setup(
        ParallelLayout(dp=2, ep=2), optimizer=OptimizerOptions(), transformer=(("moe_router_bias_update_rate", 0.01),)
    )
    results = pool.run(biases_after_a_step, 2, tmp_path, setup)
    loads = [torch.stack(parts).sum(0) for parts in zip(*(chosen for _, chosen, _ in results), strict=True)]
    assert len(loads) == 2
    for changes, _, metrics in results:
        for layer, (change, load) in enumerate(zip(changes, loads, strict=True)):
            torch.testing.assert_close(change, 0.01 * (load.mean() - load).sign())
            assert metrics[f"expert_load/max_over_mean/layer_{layer}"] == pytest.approx(load.max() / load.mean())
            assert metrics[f"expert_load/dead/layer_{layer}"] == (load == 0).sum()
