"""GRPO on gpt-oss from experts in MXFP4: the engine's log-probs, verified syncs, and an export in plain weights."""

import json

import pytest
import transformers
from safetensors.torch import load_file
from support.arithmetic_task import make_task
from support.cli_runs import RunFiles, assert_finite
from support.mxfp4_folders import quantize_experts

SIZES = ("--largest", "9", "--num-test", "20", "--lessons", "60", "60", "--pairs", "40", "10")
LAYOUT = "actor_rollout_ref.actor.megatron"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_task(tmp_path_factory.mktemp("gpt_oss"), "--family", "gpt_oss", *SIZES) / "model"
    quantize_experts(folder)
    return folder


def test_a_run_from_mxfp4_exports_trained_weights(small, dense_reward, model, start):
    """Two tensor-parallel ranks with half of the experts each."""
    run = start(
        *("--config-name", "quickstart_grpo", *small, *dense_reward, "trainer.experiment_name=gpt_oss"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "sync.verify_freq=1"),
        f"{LAYOUT}.tensor_model_parallel_size=2",
        *(f"{LAYOUT}.expert_model_parallel_size=2", f"{LAYOUT}.expert_tensor_parallel_size=1"),
        *(f"actor_rollout_ref.model.path={model}", "trainer.hf_export_dir=export", "trainer.total_training_steps=2"),
    )
    assert run.wait() == 0, run.output
    files = RunFiles(run.folder, "gpt_oss")
    assert list(files.steps) == [1, 2]
    for row in files.steps.values():
        assert_finite(row)
        assert row["actor/grad_norm"] > 1e-3
        assert row["training/rollout_log_probs_diff_max"] < 1e-5
    export = files.folder / "export"
    assert "quantization_config" not in json.loads((export / "config.json").read_text(encoding="utf-8"))
    before = transformers.GptOssForCausalLM.from_pretrained(
        model, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype="float32"
    ).state_dict()
    after = load_file(export / "model.safetensors")
    assert after.keys() == before.keys()
    assert {name for name in before if after[name].float().equal(before[name].float())} == set()
    for name, tensor in before.items():
        assert (after[name].float() - tensor.float()).abs().max() < 0.05, name
