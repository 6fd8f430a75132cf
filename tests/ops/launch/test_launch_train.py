"""Training through the launcher, and the cluster scripts."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from support.arithmetic_task import make_task

from megarl.cli import main as megarl
from megarl.ops.launch.options import launch_parser, read_job, split_job

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MODELS = ROOT / "tests/ops/plan/models"
SCRIPTS = {
    "run_8b_grpo": ("Qwen2.5-7B", {}),
    "run_70b_ppo": ("Llama-3-70B", {}),
    "run_30b_a3b_grpo": ("Qwen3-30B-A3B", {}),
    "run_671b_grpo": ("DeepSeek-V3", {"SERVERS": "http://one:30000,http://two:30000"}),
    "run_32b_async": ("Qwen2.5-32B", {}),
    "run_search_agent": ("Qwen2.5-7B", {"RETRIEVER": "http://127.0.0.1:8000/retrieve"}),
}
SAMPLES = "300,2000"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    options = ("--layers", "2", "--largest", "9", "--num-test", "20", "--lessons", "60", "60")
    return make_task(tmp_path_factory.mktemp("task"), *options)


@pytest.mark.release(
    twin="tests/ops/launch/test_launch_cluster.py::test_lost_node_is_named_and_the_job_restarts_by_srun"
)
def test_training_resumes_from_its_checkpoint_after_the_driver_is_killed(
    start_launcher, first_port, task, shared_server, warm_python, tmp_path
):
    keys = [
        f"data.train_files={task}/data/train.parquet",
        f"data.val_files={task}/data/test.parquet",
        f"actor_rollout_ref.model.path={task}/model",
        "data.train_batch_size=24",
        "actor_rollout_ref.actor.ppo_mini_batch_size=24",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        *("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.use_kl_loss=false"),
        f"reward.custom_reward_function.path={HERE / 'driver_killing_reward.py'}",
        "reward.custom_reward_function.name=score",
        "reward.num_workers=0",
        *("trainer.n_gpus_per_node=1", "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=-1"),
        *("trainer.val_before_train=false", "trainer.resume_mode=auto", "trainer.hf_export_dir=null"),
    ]
    launched = start_launcher(
        *("--on=local", "--no-doctor", f"--port={first_port}", "--max-restarts=1", "--restart-delay=0.1"),
        *(f"--python={warm_python}", "train", "--config-name", "quickstart_grpo", *keys),
        MEGARL_DIED=str(tmp_path / "died"),
        **shared_server,
    )
    assert launched.code() == 0, launched.text()
    assert "the driver ended with code 137. Restart 1 of 1 in 0.1 s, from the newest checkpoint" in launched.text()
    steps = [line.split()[1] for line in launched.text().splitlines() if line.startswith("step ")]
    assert steps == ["1/2", "2/2"], "each step once"
    assert launched.survivors() == []


def script(name, *arguments, **environment):
    inherited = {key: value for key, value in os.environ.items() if key not in ("MODEL", "DATA", "HOSTS")}
    env = {**inherited, "PYTHON": sys.executable, **environment}
    return subprocess.run(
        ["bash", str(ROOT / f"launch/{name}.sh"), *arguments], env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_names_missing_settings(name):
    process = script(name)
    assert process.returncode == 2
    assert process.stderr.startswith(f"{name}.sh: ") and " is not set; it is " in process.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_composes_its_configuration(name, warm_python):
    model, settings = SCRIPTS[name]
    settings = {"MODEL": str(MODELS / model), "DATA": "/d/x.parquet", "VAL_DATA": "/d/y.parquet", **settings}
    process = script(name, "trainer.total_epochs=3", "--cfg", "job", **settings, PYTHON=str(warm_python))
    assert process.returncode == 0, process.stderr
    values = yaml.safe_load(process.stdout)
    assert values["data"]["val_files"] == ["/d/y.parquet"] and values["trainer"]["test_freq"] == 20
    assert values["trainer"]["total_epochs"] == 3
    assert values["trainer"]["experiment_name"] == name


def overrides(settings):
    urls = "actor_rollout_ref.rollout.engine_kwargs.sglang.urls"
    keys = {
        "SERVERS": f"{urls}=[{settings.get('SERVERS')}]",
        "RETRIEVER": f"actor_rollout_ref.rollout.multi_turn.search.url={settings.get('RETRIEVER')}",
    }
    return [keys[name] for name in settings]


@pytest.mark.parametrize("name", SCRIPTS)
def test_plan_of_each_script_fits_its_machines(name, capsys):
    """Planned for H100s with the model's real sizes."""
    model, settings = SCRIPTS[name]
    plan = ["plan", "--config-name", name, "--hardware", "h100", "--lengths", SAMPLES, "data.train_files=none"]
    code = megarl([*plan, f"actor_rollout_ref.model.path={MODELS / model}", *overrides(settings)])
    assert code == 0, capsys.readouterr().out


def test_dry_run_starts_no_cluster(task, tmp_path, capsys, monkeypatch):
    """With the model's real sizes and the task's tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(task / "model", folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    shutil.copy(MODELS / "Qwen2.5-7B" / "config.json", folder)
    monkeypatch.chdir(tmp_path)
    keys = [f"actor_rollout_ref.model.path={folder}", f"data.train_files={[f'{task}/data/train.parquet'] * 13}"]
    keys += ["trainer.dry_run=true", "trainer.hardware=h100", "trainer.save_freq=-1", "reward.name=gsm8k"]
    code = megarl(["launch", "train", "--config-name", "run_8b_grpo", *keys])
    text = capsys.readouterr()
    assert code == 0, text.out + text.err
    assert "launch: " not in text.err

    keys = [f"model.path={task}/model", f"data.train_files={task}/data/sft.parquet", "data.train_batch_size=8"]
    code = megarl(["launch", "sft", "--config-name", "quickstart_sft", *keys, "trainer.dry_run=true"])
    text = capsys.readouterr()
    assert code == 0, text.out + text.err
    assert "launch: " not in text.err and "every part is fine" in text.out


def test_hosts_and_restarts_reach_the_launcher(fake_commands, tmp_path):
    settings = {"MODEL": str(MODELS / "Qwen2.5-7B"), "DATA": "/d/x.parquet", "OUTPUT": "/shared/x"}
    process = script("run_8b_grpo", HOSTS="unreachable", RESTARTS="1", **settings, **fake_commands.environment())
    assert process.returncode == 1 and "node unreachable is lost" in process.stderr
    printed = script("run_8b_grpo", SUBMIT="sbatch", LAUNCH="--sbatch=--time=2-0", **settings)
    assert "#SBATCH --time=2-0" in printed.stdout and "--max-restarts 3" in printed.stdout, printed.stderr
    assert "trainer.default_local_dir=/shared/x" in printed.stdout


def test_rayjob_of_kubernetes():
    """The manifest meets KubeRay's schema, its job is valid, and pods and devices are the job's."""
    schema = json.loads(Path(__file__).with_name("rayjob_schema.json").read_text(encoding="utf-8"))
    manifest = yaml.safe_load((ROOT / "launch/rayjob.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(manifest, schema)
    cluster = manifest["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    words = shlex.split(manifest["spec"]["entrypoint"])
    assert words[:4] == ["python", "-m", "megarl.cli", "launch"]
    launcher, words, is_megarl = split_job(words[4:])
    options = launch_parser().parse_args(launcher)
    assert is_megarl and options.on == "local-ray"
    job = read_job(words, options.max_restarts)
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == job.nodes - 1, "the head is a node"
    for pods in (cluster["headGroupSpec"], group):
        (container,) = pods["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == job.devices
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pods["template"]["spec"]["volumes"]}


def test_scripts_and_configurations_reference_each_other():
    for name in SCRIPTS:
        assert f"launch/{name}.sh" in (ROOT / f"configs/{name}.yaml").read_text(encoding="utf-8")
        assert f"configs/{name}.yaml" in (ROOT / f"launch/{name}.sh").read_text(encoding="utf-8")
