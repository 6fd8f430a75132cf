"""The tools in docs/how_to/debugging.md."""

import json
import subprocess
import sys

import pytest
from safetensors import safe_open
from support.doc_pages import ROOT

from megarl.models import ParallelLayout, WeightMap, check_layout, read_model_config


def run_tool(name, *arguments):
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def write_run(folder, rows):
    run = folder / "2026-01-01_00-00-00"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return folder


def test_compare_runs_ignores_timings(tmp_path):
    first = write_run(
        tmp_path / "one", [{"step": 1, "actor/grad_norm": 200.0, "timing_s/gen": 1.0}, {"step": 2, "x": 1.0}]
    )
    second = write_run(tmp_path / "other", [{"step": 1, "actor/grad_norm": 200.001, "timing_s/gen": 9.0}])
    result = run_tool("compare_runs", str(first), str(second))
    assert result.returncode == 0, result.stdout
    assert "1 numbers of 1 steps; largest difference 5.0e-06 (actor/grad_norm in step 1)" in result.stdout


@pytest.mark.parametrize("value", [200.1, float("nan"), None])
def test_compare_runs_names_differing_metrics(tmp_path, value):
    row = {"step": 1, "actor/grad_norm": value, "actor/lr": 1e-6}
    first = write_run(tmp_path / "one", [{"step": 1, "actor/grad_norm": 200.0, "actor/lr": 1e-6}])
    second = write_run(tmp_path / "other", [{k: v for k, v in row.items() if v is not None}])
    result = run_tool("compare_runs", str(first), str(second))
    assert result.returncode == 1 and "step 1  actor/grad_norm" in result.stdout and "actor/lr" not in result.stdout


def test_compare_runs_without_metrics_fails(tmp_path):
    result = run_tool("compare_runs", str(tmp_path), str(tmp_path))
    assert result.returncode != 0 and "no metrics.jsonl here" in result.stderr


def test_tiny_model_keeps_family_and_ratios(tmp_path):
    """The sizes of Qwen3-30B-A3B (eight heads per group) with a small vocabulary and few layers and experts."""
    large = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 300, "hidden_size": 2048,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "layer_types": ["full_attention", "full_attention"],
    }  # fmt: skip
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(large), encoding="utf-8")
    (tmp_path / "large" / "tokenizer.json").write_text("{}", encoding="utf-8")
    result = run_tool(
        "tiny_model", str(tmp_path / "large"), str(tmp_path / "small"), "--layers", "4", "--hidden", "128"
    )
    assert result.returncode == 0, result.stderr
    config = read_model_config(tmp_path / "small")
    assert (config.num_layers, config.hidden_size, config.architecture) == (4, 128, "Qwen3MoeForCausalLM")
    assert (tmp_path / "small" / "tokenizer.json").is_file()
    with safe_open(tmp_path / "small" / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 -- no mapping
    assert WeightMap(config).hf_shapes() == shapes
    check_layout(config, ParallelLayout(tp=1, pp=4, ep=8, dp=8), "layout")
