"""GRPO on models with gated delta nets: the engine's log-probs, verified syncs, an exact resume, and adapters."""

import pytest
from safetensors.torch import load_file
from support.arithmetic_task import make_task
from support.cli_runs import RunFiles, assert_finite, reproducible

SIZES = ("--largest", "9", "--num-test", "20", "--lessons", "60", "60", "--pairs", "40", "10")
LAYOUT = "actor_rollout_ref.actor.megatron"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return lambda family: make_task(tmp_path_factory.mktemp(family), "--family", family, *SIZES) / "model"


@pytest.fixture(scope="module")
def arguments(small, dense_reward):
    return [
        *("--config-name", "quickstart_grpo", *small, *dense_reward, "trainer.experiment_name=hybrid"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "sync.verify_freq=1"),
    ]


def check_steps(run, steps):
    """Rewards of random answers differ, so each step has a gradient."""
    assert run.wait() == 0, run.output
    files = RunFiles(run.folder, "hybrid")
    assert list(files.steps) == list(range(1, steps + 1))
    for row in files.steps.values():
        assert_finite(row)
        assert row["actor/grad_norm"] > 1e-3
        assert row["training/rollout_log_probs_diff_max"] < 1e-5
    return files


@pytest.mark.release(twin="tests/e2e/test_e2e_gated_delta_nets.py::test_adapters_train_the_projections_only")
def test_a_resumed_run_repeats_the_third_step(arguments, models, start):
    """Qwen3-Next with experts at TP=2; bit for bit."""
    keys = [*arguments, f"actor_rollout_ref.model.path={models('qwen3_next')}", "trainer.total_training_steps=3"]
    whole = check_steps(start(*keys, "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=9"), 3)
    checkpoint = next(whole.folder.rglob("global_step_2"))
    run = start(*keys, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    assert run.wait() == 0, run.output
    assert reproducible(RunFiles(run.folder, "hybrid").steps[3]) == reproducible(whole.steps[3])


def test_adapters_train_the_projections_only(arguments, models, start):
    """Qwen3.5 at PP=2, and the merged model as a folder."""
    model = models("qwen3_5")
    layout = (f"{LAYOUT}.tensor_model_parallel_size=1", f"{LAYOUT}.pipeline_model_parallel_size=2")
    adapters = ("actor_rollout_ref.model.lora_rank=4", "trainer.hf_export_dir=export", "trainer.total_training_steps=2")
    files = check_steps(start(*arguments, f"actor_rollout_ref.model.path={model}", *layout, *adapters), 2)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, files.folder / "export"))
    changed = {name.removeprefix("model.layers.") for name in before if not before[name].equal(after[name])}
    projections = {f"0.linear_attn.{name}.weight" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")}
    attention = {f"1.self_attn.{name}_proj.weight" for name in "qkvo"}
    mlps = {f"{layer}.mlp.{name}_proj.weight" for layer in (0, 1) for name in ("gate", "up", "down")}
    assert changed == projections | attention | mlps | {"0.linear_attn.out_proj.weight"}
