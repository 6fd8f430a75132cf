"""User-set fields of Megatron's configuration reach the model; fields reserved for megarl are rejected."""

from __future__ import annotations

import ast
import dataclasses
from contextlib import suppress
from typing import Any

import pytest
import torch
from engine_cases import Setup, engine, micro_batches
from family_cases import MODELS
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from support.expected_errors import raises
from tiny_models import TEMPERATURE, rows, save_model

from megarl.config import MegatronConfig
from megarl.config.checks.transformer_fields import OWNED, REJECTED, SUPPORTED, attention_backends, transformer_fields
from megarl.config.keys import key_at
from megarl.megatron import MegatronOptions, OutputOptions, RecomputeOptions
from megarl.megatron.engine import options as engine_options
from megarl.megatron.engine.options import build_transformer_config
from megarl.models import ParallelLayout, read_model_config

MODULES = key_at(MegatronConfig, "recompute_modules").limits.choices
CHOSEN = {"deallocate_pipeline_outputs": False, "clone_scatter_output_in_embedding": False}


def fields_and_log_probs(place, path, setup):
    """Configuration of the running engine's layers, and its outputs."""
    with engine(place, path, setup) as built:
        answers = built.forward(micro_batches(rows(1), setup), OutputOptions(TEMPERATURE))
        config = built._stage.chunks[0].decoder.layers[0].config
        return {name: getattr(config, name) for name in CHOSEN}, torch.cat([answer.log_probs for answer in answers])


def test_user_fields_reach_every_rank(pool, tmp_path):
    save_model(tmp_path, "qwen3")
    layout = ParallelLayout(tp=2)
    plain = pool.run(fields_and_log_probs, 2, tmp_path, Setup(layout))
    chosen = pool.run(fields_and_log_probs, 2, tmp_path, Setup(layout, transformer=tuple(CHOSEN.items())))
    for (before, expected), (after, actual) in zip(plain, chosen, strict=True):
        assert before != after == CHOSEN
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mistral", "llama_yarn", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("fused", [False, True])
def test_every_field_that_megarl_sets_is_owned_or_supported(name, fused, tmp_path, monkeypatch):
    """The config room's list of fields, which may not import Megatron, against the fields set here."""
    seen: dict[str, Any] = {}
    take = engine_options.supported_arguments

    def note(config, arguments):
        seen.update(arguments)
        return take(config, arguments)

    monkeypatch.setattr(engine_options, "supported_arguments", note)
    save_model(tmp_path, **MODELS[name])
    options = MegatronOptions(sequence_parallel=True, recompute=RecomputeOptions())
    with suppress(ValueError):  # fused kernels are refused where Transformer Engine is not installed
        build_transformer_config(read_model_config(tmp_path), ParallelLayout(tp=2, pp=2), options, fused=fused)
    assert len(seen) > 30
    allowed = OWNED.keys() | SUPPORTED
    assert seen.keys() <= allowed, sorted(seen.keys() - allowed)


def test_user_value_overrides_a_supported_field(tmp_path):
    save_model(tmp_path, "qwen3")
    options = MegatronOptions(transformer={"bias_dropout_fusion": True})
    config = build_transformer_config(read_model_config(tmp_path), ParallelLayout(), options, fused=False)
    assert config.bias_dropout_fusion


KERNELS = {
    "apply_rope_fusion": False,
    "attention_backend": "unfused",
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": True,
    "moe_permute_fusion": True,
}


def test_fields_of_transformer_engine_reach_its_layers_only(tmp_path, monkeypatch, caplog):
    assert KERNELS.keys() == engine_options.FUSED_ONLY < SUPPORTED
    save_model(tmp_path, "qwen3")
    model, options = read_model_config(tmp_path), MegatronOptions(transformer=KERNELS)
    plain = build_transformer_config(model, ParallelLayout(), MegatronOptions(), fused=False)
    assert build_transformer_config(model, ParallelLayout(), options, fused=False) == plain
    (record,) = caplog.records
    assert record.getMessage() == (
        "override_transformer_config: attention_backend=unfused, gradient_accumulation_fusion=True, "
        "moe_permute_fusion=True needs Transformer Engine; this role has torch's layers"
    )
    monkeypatch.setattr(TransformerConfig, "__post_init__", lambda config: None)  # it asks for Transformer Engine
    config = build_transformer_config(model, ParallelLayout(), options, fused=True)
    assert {name: getattr(config, name) for name in KERNELS} == {**KERNELS, "attention_backend": AttnBackend.unfused}
    assert len(caplog.records) == 1


def test_full_precision_sums_of_bfloat16_products_are_turned_on(tmp_path):
    save_model(tmp_path, "qwen3")
    options = MegatronOptions(dtype=torch.bfloat16, transformer={"disable_bf16_reduced_precision_matmul": True})
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    try:
        build_transformer_config(read_model_config(tmp_path), ParallelLayout(), options, fused=False)
        assert before and not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


def test_fields_from_source_equal_those_of_the_class():
    assert {field.name for field in dataclasses.fields(TransformerConfig)} == set(transformer_fields())
    assert tuple(AttnBackend.__members__) == attention_backends()
    annotations = {name: ast.unparse(transformer_fields()[name].annotation) for name in SUPPORTED}
    assert {name: annotation for name, annotation in annotations.items() if annotation != "bool"} == {
        "attention_backend": "AttnBackend",
        "moe_router_load_balancing_type": "Union[str, List[str]]",
        "moe_aux_loss_coeff": "Union[float, List[float]]",
        "moe_z_loss_coeff": "Optional[float]",
        "moe_router_bias_update_rate": "float",
    }


def test_every_field_of_the_installed_release_is_classified():
    """A failure here after an upgrade: classify the new fields in ``transformer_fields.py``."""
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert sorted(fields - SUPPORTED - OWNED.keys() - REJECTED.keys()) == []


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_next", "gemma3"])
@pytest.mark.parametrize("module", MODULES)
def test_megatron_accepts_every_recomputed_module_with_torchs_layers(name, module, tmp_path):
    """Only the activation of grouped experts needs Transformer Engine, and megarl's error says so."""
    save_model(tmp_path, **MODELS[name])
    options = MegatronOptions(recompute=RecomputeOptions("selective", modules=(module,)))
    if module != "moe_act":
        config = build_transformer_config(read_model_config(tmp_path), ParallelLayout(), options, fused=False)
        assert config.recompute_modules == [module]
        return
    with raises("config.recompute-moe-act", "recompute_modules=['moe_act']", "Transformer Engine", "use moe"):
        build_transformer_config(read_model_config(tmp_path), ParallelLayout(), options, fused=False)
