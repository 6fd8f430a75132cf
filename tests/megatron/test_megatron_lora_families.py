"""Adapters on experts, routers, latent projections, output layers and critics, against gradients of merged weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from engine_cases import Setup, engine, micro_batches, policy_loss, value_loss
from family_cases import MODELS, in_checkpoint_names
from support.release import of_release
from tiny_models import TEMPERATURE, policy_reference, rows, save_model, value_reference
from torch import Tensor

from megarl.megatron import OptimizerOptions, OutputOptions
from megarl.models import ParallelLayout, WeightMap, read_model_config
from megarl.models.adapters import AdapterMap, LoraOptions
from tests.megatron.test_megatron_lora import pieces, set_values, values_of, whole

SETTINGS = {**MODELS, "untied": {"family": "llama"}, "large_untied": {"family": "llama", "num_hidden_layers": 4}}
EVERYTHING = LoraOptions(rank=3, alpha=6.0, targets=("all-linear", "router", "lm_head"))
EVERYTHING_DENSE = LoraOptions(rank=3, alpha=6.0, targets=("all-linear", "lm_head"))
LINEAR = LoraOptions(rank=3, alpha=6.0)
CASES = {
    "output_layer_tp2": ("untied", ParallelLayout(tp=2), LoraOptions(2, 4.0, ("lm_head", "linear_fc1"))),
    "experts_alone_ep2": ("mixtral", ParallelLayout(dp=2, ep=2), LoraOptions(2, 4.0, ("w1", "w2"))),
    "experts_tp2ep2etp1": ("mixtral", ParallelLayout(tp=2, ep=2, etp=1), EVERYTHING),
    "experts_dp4ep2etp2": ("mixtral", ParallelLayout(dp=4, ep=2, etp=2), EVERYTHING),
    "shared_experts_tp2ep2dp2": ("qwen2_moe", ParallelLayout(tp=2, dp=2, ep=2), EVERYTHING),
    "experts_pp2ep2dp2": ("qwen3_moe", ParallelLayout(pp=2, dp=2, ep=2), LINEAR),
    "latent_tp2ep2etp1": ("deepseek_v3", ParallelLayout(tp=2, ep=2, etp=1), EVERYTHING),
    "latent_cp2ep2": ("deepseek_v2", ParallelLayout(cp=2, ep=2), LINEAR),
    "delta_nets_by_head_tp2": ("qwen3_next_dense", ParallelLayout(tp=2), LINEAR),
    "delta_nets_by_kind_tp2ep2etp1": ("qwen3_5_moe", ParallelLayout(tp=2, ep=2, etp=1), EVERYTHING),
    "output_norms_tp2cp2": ("olmo3", ParallelLayout(tp=2, cp=2), LINEAR),
    "output_biases_tp2ep2etp1": ("gpt_oss", ParallelLayout(tp=2, ep=2, etp=1), EVERYTHING),
    "dora_output_biases_tp2ep2etp1": ("gpt_oss", ParallelLayout(tp=2, ep=2, etp=1), replace(LINEAR, kind="dora")),
    "dora_output_layer_tp2": ("untied", ParallelLayout(tp=2), replace(EVERYTHING_DENSE, kind="dora")),
    "dora_experts_dp4ep2etp2": ("mixtral", ParallelLayout(dp=4, ep=2, etp=2), replace(EVERYTHING, kind="dora")),
    "dora_latent_tp2ep2etp1": ("deepseek_v3", ParallelLayout(tp=2, ep=2, etp=1), replace(EVERYTHING, kind="dora")),
    "dora_delta_nets_tp2": ("qwen3_next_dense", ParallelLayout(tp=2), replace(LINEAR, kind="dora")),
    "critic_tp2": ("token_critic", ParallelLayout(tp=2), LINEAR),
    "expert_critic_pp2vpp1": ("expert_critic", ParallelLayout(pp=2), LINEAR),
}
MORE = ("experts_alone_ep2", "experts_tp2ep2etp1", "experts_dp4ep2etp2", "latent_tp2ep2etp1", "delta_nets_by_head_tp2")
MORE += ("output_biases_tp2ep2etp1", "output_layer_tp2")
"""DoRA contains LoRA: a case with DoRA has the same layers and layout, or larger ones."""


class Expected(NamedTuple):
    """Results of a transformers model whose weights have the adapters merged into them."""

    values: dict[str, Tensor]
    outputs: Tensor
    grads: dict[str, Tensor]


def expected_of(path, name, lora, batch):
    """With ``W' = f (W + s B A)``: ``dB = s f dW' A^T`` and ``dA = s f B^T dW'``; without DoRA ``f = 1``.

    With DoRA ``f = m / n`` for constant norms ``n`` of the rows: ``dm = sum(dW' W') / m``.
    """
    settings = SETTINGS[name]
    critic, scale = "critic" in settings, lora.alpha / lora.rank
    model = save_model(path, **settings)
    shapes = AdapterMap(WeightMap(read_model_config(path), value_head=critic), lora).hf_shapes()
    values = values_of({key: shape for key, shape in shapes.items() if "lora_" in key})
    params = dict(model.named_parameters())
    weights = in_checkpoint_names(params, settings["family"])
    layers = [key.removesuffix(".lora_A.weight") for key in values if "lora_A" in key]
    factors = {layer: torch.ones(1) for layer in layers}
    with torch.no_grad():
        for layer in layers:
            a, b = (values[f"{layer}.lora_{part}.weight"] for part in "AB")
            weight = weights[f"{layer}.weight"]
            weight += scale * b @ a
            if lora.has_magnitudes:
                factors[layer] = (values[f"{layer}.lora_magnitude_vector"] / weight.norm(dim=1))[:, None]
                weight *= factors[layer]
    loss, outputs = torch.zeros(()), []
    for row in batch:
        if critic:
            answer = value_reference(model, row)
            loss = loss + ((answer - row.returns).square() * row.weights).sum()
        else:
            answer, entropy = policy_reference(model, row)
            loss = loss - (answer * row.weights).sum() - 0.3 * (entropy * row.weights).sum()
        outputs.append(answer.detach())
    loss.backward()
    whole_grads = in_checkpoint_names({key: param.grad for key, param in params.items()}, settings["family"])
    grads = {key: whole_grads[key] for key in shapes if key.startswith("score.")}
    for layer in layers:
        a, b = (values[f"{layer}.lora_{part}.weight"] for part in "AB")
        grad = whole_grads[f"{layer}.weight"]
        if lora.has_magnitudes:
            name = f"{layer}.lora_magnitude_vector"
            grads[name] = (grad * weights[f"{layer}.weight"].detach()).sum(1) / values[name]
            grad = grad * factors[layer]
        grads |= {f"{layer}.lora_A.weight": scale * b.T @ grad, f"{layer}.lora_B.weight": scale * grad @ a.T}
    return Expected(values, torch.cat(outputs), grads)


class Answer(NamedTuple):
    grads: list[tuple[Any, Tensor]]
    grad_norm: float
    outputs: Tensor | None
    trained: int


def adapted_pass(place, path, setup, values, batch):
    with engine(place, path, setup) as built:
        heads = {key: None for key in built.trained_map.hf_shapes() if key not in values}
        set_values(built, values, skip=heads)
        options = OutputOptions() if setup.value_head else OutputOptions(TEMPERATURE, with_entropy=True)
        outputs = built.forward(micro_batches(batch, setup), options)
        if outputs is not None:
            outputs = torch.cat([o.values if setup.value_head else o.log_probs for o in outputs])
        mine = micro_batches(batch, setup, built.runtime.coordinate.dp, setup.layout.dp)
        built.forward_backward(mine, value_loss if setup.value_head else policy_loss, options)
        params = built.weights.parameters()
        grads = {name: param.main_grad.clone() for name, param in params.items()}
        trained = sum(param.requires_grad for chunk in built.chunks for param in chunk.parameters())
        assert trained == len(params), "nothing but the adapters and the head has a gradient"
        return Answer(pieces(built, grads), built.optimizer_step().grad_norm, outputs, trained)


@pytest.mark.parametrize("name", of_release([name for name in CASES if name not in MORE], MORE))
def test_gradients_equal_those_of_merged_weights(pool, tmp_path, name):
    model, layout, lora = CASES[name]
    batch = rows(3)
    expected = expected_of(tmp_path, model, lora, batch)
    setup = Setup(
        layout,
        value_head="critic" in SETTINGS[model],
        sequence_parallel=name.endswith("output_layer_tp2"),
        optimizer=OptimizerOptions(use_distributed_optimizer=False),
        lora=lora,
    )

    answers = pool.run(adapted_pass, layout.world_size, tmp_path, setup, expected.values, batch)

    grads = whole({key: grad.shape for key, grad in expected.grads.items()}, [p for a in answers for p in a.grads])
    largest = max(grad.abs().max().item() for grad in expected.grads.values())
    for key, grad in expected.grads.items():
        torch.testing.assert_close(grads[key], grad, rtol=1e-4, atol=1e-5 * largest, msg=lambda m, k=key: f"{k}: {m}")
    norm = torch.cat([grad.flatten() for grad in expected.grads.values()]).norm().item()
    assert [answer.grad_norm for answer in answers] == pytest.approx([norm] * len(answers), rel=1e-5)
    if layout.cp == 1:
        torch.testing.assert_close(answers[-1].outputs, expected.outputs, rtol=0, atol=1e-5)
