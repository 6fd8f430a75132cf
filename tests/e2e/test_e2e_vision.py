"""Jobs with images from the command line: the engine sees them, the tower stays, and runs resume exactly."""

import base64
import gzip
import json
import re

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from support.cli_runs import RunFiles, assert_finite, read_jsonl, reproducible
from support.squares_task import make_squares_task

from megarl.base.image_tokens import image_key
from megarl.trainer.state.trainer_state import TrainerState

STEPS = 2
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    return make_squares_task(tmp_path_factory.mktemp("squares"), "--num-train", "24")


@pytest.fixture(scope="module")
def arguments(squares, dense_reward):
    return [
        *("--config-name", "vision", *dense_reward, f"actor_rollout_ref.model.path={squares}/model"),
        *(f"data.train_files={squares}/data/train.parquet", f"data.val_files={squares}/data/test.parquet"),
        *("data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=6", f"{ROLLOUT}.n=4", "data.max_response_length=4"),
        *("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=9", "trainer.max_critic_ckpt_to_keep=9"),
        *("trainer.val_before_train=false", f"trainer.total_training_steps={STEPS}", "sync.verify_freq=1"),
    ]


def finished(run):
    assert run.wait() == 0, run.output
    files = RunFiles(run.folder, "vision")
    assert list(files.steps) == list(range(1, STEPS + 1))
    for row in files.steps.values():
        assert_finite(row)
        assert row["actor/grad_norm"] > 1e-3
        for rows in ("", "/images"):  # every prompt has a picture
            assert row[f"training/rollout_log_probs_diff_max{rows}"] < 1e-5
    return files


@pytest.fixture(scope="module")
def trained(arguments, start):
    return finished(start(*arguments, "trainer.hf_export_dir=export", "trainer.rollout_data_dir=dumps"))


def unchanged_tensors(squares, files):
    """Names of the tensors that are equal in the initial model and a run's export, and of the tower's."""
    before, after = (load_file(folder / "model.safetensors") for folder in (squares / "model", files.folder / "export"))
    assert before.keys() == after.keys()
    unchanged = {name for name in before if before[name].equal(after[name])}
    return unchanged, {name for name in before if name.startswith("visual.")}


def test_the_decoder_learns_and_the_export_has_the_tower(trained, squares):
    unchanged, tower = unchanged_tensors(squares, trained)
    assert tower and tower <= unchanged
    assert not any(name.endswith("proj.weight") for name in unchanged - tower)


def test_a_resumed_run_repeats_the_second_step(trained, arguments, start):
    checkpoint = next(trained.folder.rglob("global_step_1"))
    run = start(*arguments, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    assert run.wait() == 0, run.output
    assert reproducible(RunFiles(run.folder, "vision").steps[2]) == reproducible(trained.steps[2])


def test_a_trained_tower_is_synced_exported_and_resumed(arguments, squares, start):
    """The engine's log-probs after the first step show that it has the new tower."""
    tower = (f"{ACTOR}.freeze_vision_tower=false", f"{ACTOR}.vision_lr_factor=0.5")
    files = finished(start(*arguments, *tower, "trainer.hf_export_dir=export"))
    unchanged, names = unchanged_tensors(squares, files)
    assert names and not unchanged & names
    checkpoint = next(files.folder.rglob("global_step_1"))
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    run = start(*arguments, *tower, *resume)
    assert run.wait() == 0, run.output
    assert reproducible(RunFiles(run.folder, "vision").steps[2]) == reproducible(files.steps[2])
    run = start(*arguments, *resume)
    assert run.wait() != 0 and "vision.trained" in run.output


def test_ppo_beside_generation(arguments, squares, start):
    """A critic that sees the pictures, a pipeline, adapters on towers too, and generation beside training; the prompts
    in flight of a checkpoint have their pictures."""
    keys = ("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=false", "algorithm.use_kl_in_reward=true")
    layout = (f"{ACTOR}.megatron.tensor_model_parallel_size=1", f"{ACTOR}.megatron.pipeline_model_parallel_size=2")
    mode = ("async_training.mode=colocated", "async_training.max_staleness=0", f"{ACTOR}.freeze_vision_tower=false")
    models = ("actor_rollout_ref.model", "critic.model")
    lora = [f"{model}.{key}" for model in models for key in ("lora_rank=4", "lora.adapt_vision_tower=true")]
    lora.append("actor_rollout_ref.model.lora.freeze_vision_projection=false")
    shown = ("trainer.test_freq=2", "trainer.log_val_generations=2")
    run = start(*arguments, *keys, *layout, *mode, *lora, *shown, "trainer.hf_export_dir=export")
    files = finished(run)
    assert run.output.count("question user <image>How many squares?") == 2
    assert all(row["critic/grad_norm"] > 0 for row in files.steps.values())
    unchanged, tower = unchanged_tensors(squares, files)
    assert {name for name in tower - unchanged if "merger" in name} == {name for name in tower if "merger" in name}
    layers = {name for name in tower if name.endswith(("qkv.weight", "proj.weight")) and "patch_embed" not in name}
    assert layers and unchanged & tower == {name for name in tower - layers if "merger" not in name}
    penalties = [files.steps[step]["actor/reward_kl_penalty"] for step in (1, 2)]
    assert penalties[0] == 0 != penalties[1]

    checkpoint = next(files.folder.rglob("global_step_1"))
    in_flight = TrainerState.read(checkpoint).rollout["groups"]
    assert len(in_flight) == 6
    for group in in_flight:
        [(file, *_, key)] = group["facts"]["images"]
        assert image_key(file) == key
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    run = start(*arguments, *keys, *layout, *mode, *lora, *shown, *resume)
    assert run.wait() == 0, run.output
    assert same_training(RunFiles(run.folder, "vision").steps[2]) == same_training(files.steps[2])


def same_training(row):
    """Metrics of training; those of the engine depend on the sequences that it decodes at the same time."""
    return {name: value for name, value in reproducible(row).items() if name.startswith(("actor/", "critic/"))}


def test_distillation_from_a_teacher_that_sees(arguments, tmp_path, start):
    teacher = make_squares_task(tmp_path / "teacher", "--hidden", "64", "--seed", "7") / "model"
    models = "distillation.teacher_models.teacher_model"
    layout = (f"{models}.megatron.pipeline_model_parallel_size=2", f"{models}.megatron.tensor_model_parallel_size=1")
    keys = ("distillation.enabled=true", f"{models}.model_path={teacher}", *layout, f"{ACTOR}.use_kl_loss=false")
    loss = ("distillation.distillation_loss.loss_mode=full", "distillation.distillation_loss.use_task_rewards=false")
    files = finished(start(*arguments, *keys, *loss, "trainer.save_freq=-1"))
    assert all(row["actor/distillation/loss"] > 0 for row in files.steps.values())


def pictures(path):
    """Files of a data set's pictures by digest."""
    files = [row["images"][0]["bytes"] for row in pq.read_table(path).to_pylist()]
    return {f"{image_key(data):x}": data for data in files}


def report_data(folder):
    """Data of a run's page, which has no byte of a picture's file."""
    page = (folder / "report.html").read_text(encoding="utf-8")
    return json.loads(gzip.decompress(base64.b64decode(re.search(r'id="data"[^>]*>([^<]*)<', page)[1])))


def test_samples_of_training_name_their_pictures(trained, squares):
    known = pictures(squares / "data" / "train.parquet")
    samples = read_jsonl(trained.newest / "samples" / "train" / "1.jsonl")
    shown = {digest for sample in samples for digest in sample["images"]}
    assert shown <= known.keys() and shown == {name for sample in samples for name in sample.get("thumbnails", ())}
    dump = read_jsonl(trained.folder / "dumps" / "1.jsonl")
    assert len(dump) == 24 and all(row["images"][0] in known and "thumbnails" not in row for row in dump)
    assert {row["input"].count("<image>") for row in [*samples, *dump]} == {1}
    assert shown <= report_data(trained.newest)["thumbnails"].keys()


def test_evaluate_and_generate(squares, start):
    test, samples = squares / "data" / "test.parquet", 4
    common = (f"actor_rollout_ref.model.path={squares}/model", f"data.val_files={test}", "trainer.experiment_name=v")
    run = start("--config-name", "quickstart_evaluate", *common, job="evaluate")
    assert run.wait() == 0, run.output
    folder, known = RunFiles(run.folder, "v").newest, pictures(test)
    answers = read_jsonl(folder / "answers" / "0.jsonl")
    assert [row["images"] for row in answers] == [[digest] for digest in known for _ in range(samples)]
    assert report_data(folder)["thumbnails"].keys() == known.keys()

    run = start("--config-name", "quickstart_generate", *common, "data.prompts=[]", job="generate")
    assert run.wait() == 0, run.output
    assert run.output.count("<image>How many squares?  ->  ") == len(known)
    rows = read_jsonl(RunFiles(run.folder, "v").newest / "answers.jsonl")
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(known)))
    assert all(row["prompt"][0]["content"] == "<image>How many squares?" and "images" not in row for row in rows)
    assert [text for row in rows for text in row["responses"]] == [row["output"] for row in answers]
