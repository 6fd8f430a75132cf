"""Jobs with images and SGLang, with a frozen and a trained vision tower."""

import pytest
from safetensors.torch import load_file
from support.cli_runs import RunFiles, assert_finite
from support.squares_task import make_squares_task

pytestmark = pytest.mark.sglang
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(("ranks", "frozen"), [(1, True), (1, False), (2, False)])
def test_sglang_has_the_tower_of_each_step(tmp_path, dense_reward, start, ranks, frozen):
    """The log-probs after the first step show that SGLang has the new one."""
    squares = make_squares_task(tmp_path, "--num-train", "24", "--hidden", "64")
    run = start(
        *("--config-name", "vision", *dense_reward, f"actor_rollout_ref.model.path={squares}/model"),
        *(f"data.train_files={squares}/data/train.parquet", f"data.val_files={squares}/data/test.parquet"),
        *("data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=6", f"{ROLLOUT}.n=4", "data.max_response_length=4"),
        *("trainer.save_freq=-1", "trainer.val_before_train=false", "trainer.test_freq=-1", "sync.verify_freq=1"),
        *("trainer.total_training_steps=2", f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.replicas=1"),
        *(f"{ROLLOUT}.tensor_model_parallel_size={ranks}", f"{ACTOR}.freeze_vision_tower={str(frozen).lower()}"),
        "trainer.hf_export_dir=export",
    )
    assert run.wait() == 0, run.output
    files = RunFiles(run.folder, "vision")
    assert list(files.steps) == [1, 2]
    for row in files.steps.values():
        assert_finite(row)
        assert row["actor/grad_norm"] > 1e-3 and row["training/rollout_log_probs_diff_max/images"] < 1e-5
    before, after = (load_file(path / "model.safetensors") for path in (squares / "model", files.folder / "export"))
    assert {before[name].equal(after[name]) for name in before if name.startswith("visual.")} == {frozen}
