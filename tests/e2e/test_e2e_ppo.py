"""PPO from the command line: the files of a run, and bit-exact resume of a killed run."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import zipfile
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from reward_functions import FULL_FOLDER, FULL_FROM, FULL_UNTIL, PAUSE_AT, PAUSED
from safetensors.torch import load_file
from support.cli_runs import ROOT, RunFiles, assert_finite, read_jsonl, reproducible
from support.documented_metrics import undocumented
from support.listeners import assert_on_loopback, listening_processes
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.base.checkpoint_files import POINTER
from megarl.cluster.fork_server import ENVIRONMENT
from megarl.ops.report.charts import balance_maps
from megarl.ops.report.run_files import read_run
from megarl.tracing.trace_file import read_trace
from megarl.tracking.jsonl_files import read_balance
from megarl.tracking.token_columns import TOKEN_COLUMNS, TokenValues
from megarl.trainer.state.checkpoint_manifest import MANIFEST
from megarl.trainer.state.checkpoint_store import CheckpointStore

STEPS, PROMPTS, SAMPLES = 5, 24, 48
TARGET_KL, HORIZON = 0.1, 1000
IN_BACKGROUND = ["actor_rollout_ref.actor.checkpoint.async_save=true", "critic.checkpoint.async_save=true"]
FULL_IN_STEP = 2
OTHER_LAYOUT = [
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.sequence_parallel=false",
    *("critic.megatron.pipeline_model_parallel_size=1", "critic.megatron.tensor_model_parallel_size=2"),
]
DYING_WRITER = Path(__file__).with_name("dying_writer")
PROFILED_STEP = 2
KILLED_IN_STEP = 3  # the previous checkpoint is in the middle of an epoch; the next epoch starts with step 4

KEY, PASSWORD, FROM_ENVIRONMENT = "k3y-of-the-judge", "pa55word-of-a-proxy", "t0ken-of-the-environment"
KEY_VARIABLE = "MEGARL_E2E_JUDGE_TOKEN"
SECRETS = [
    f"reward.custom_reward_function.reward_kwargs.api_key={KEY}",
    f"reward.custom_reward_function.reward_kwargs.proxy='http://user:{PASSWORD}@127.0.0.1:9/v1'",
    f"reward.custom_reward_function.reward_kwargs.access_token=${{oc.env:{KEY_VARIABLE}}}",
]

METRICS = [
    *(f"actor/{name}" for name in ("pg_loss", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "entropy", "grad_norm")),
    *("actor/lr", "actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"),
    *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "vf_explained_var", "grad_norm", "lr")),
    *(
        f"critic/{name}/{statistic}"
        for name in ("score", "rewards", "advantages", "returns", "values")
        for statistic in ("mean", "max", "min")
    ),
    *(
        f"{name}/{statistic}"
        for name in ("prompt_length", "response_length")
        for statistic in ("mean", "max", "min", "clip_ratio")
    ),
    *(
        f"timing_s/{phase}"
        for phase in [
            "gen",
            "reward",
            "old_log_prob",
            "ref",
            "values",
            "adv",
            "update_critic",
            "update_actor",
            "update_weights",
            "step",
        ]
    ),
    *("timing_per_token_ms/gen", "timing_per_token_ms/update_actor", "perf/throughput", "perf/total_num_tokens"),
    *(f"global_seqlen/{name}" for name in ("mean", "min", "max", "minmax_diff", "balanced_min", "balanced_max")),
    *("global_seqlen/imbalance", "global_seqlen/balanced_imbalance"),
    *("training/global_step", "training/epoch", "training/rollout_probs_diff_mean", "reward/failed"),
]


TRACED = [
    *("trainer.timeline.enable=true", "global_profiler.tool=torch", f"global_profiler.steps=[{PROFILED_STEP}]"),
    *("actor_rollout_ref.actor.profiler.enable=true", "actor_rollout_ref.actor.profiler.ranks=[1]"),
]


@pytest.fixture(scope="module")
def arguments(small, dense_reward):
    """Actor at TP=2 with sequence parallelism and the reference in host memory; critic at DP=2; KL in the reward."""
    return [
        *("--config-name", "quickstart", *small, *dense_reward),
        "trainer.experiment_name=ppo",
        "actor_rollout_ref.actor.megatron.sequence_parallel=true",
        f"trainer.total_training_steps={STEPS}",
        *("trainer.test_freq=2", "trainer.save_freq=1", "trainer.resume_mode=auto"),
        *("trainer.max_actor_ckpt_to_keep=3", "trainer.max_critic_ckpt_to_keep=2"),
        *("algorithm.kl_ctrl.type=adaptive", f"algorithm.kl_ctrl.horizon={HORIZON}"),
        f"algorithm.kl_ctrl.target_kl={TARGET_KL}",
        *("trainer.validation_data_dir=validation", "trainer.rollout_data_dir=rollouts", "trainer.hf_export_dir=hf"),
        "sync.verify_freq=1",
    ]


@pytest.fixture(scope="module")
def whole_run(
    arguments,
    start,
    shared_server,
    tmp_path_factory,
):
    """An uninterrupted run; if mounting is permitted, the checkpoint disk is full during one step."""
    folder = tmp_path_factory.mktemp("whole")
    checkpoints = folder / "outputs" / "ppo" / "checkpoints"
    env = {**shared_server, KEY_VARIABLE: FROM_ENVIRONMENT}
    checkpoints.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(checkpoints)]
    is_mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    if is_mounted:
        first = (FULL_IN_STEP - 1) * SAMPLES + 1
        env |= {FULL_FROM: str(first), FULL_UNTIL: str(first + SAMPLES), FULL_FOLDER: str(checkpoints)}
    try:
        run = start(*arguments, *TRACED, *SECRETS, folder=folder, env=env)
        assert run.wait() == 0, run.output
        assert run.remaining() == []
        yield run
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(checkpoints)], check=True)


@pytest.fixture(scope="module")
def whole(whole_run):
    return RunFiles(whole_run.folder, "ppo")


def test_every_step_has_the_metrics_of_verl(whole):
    assert list(whole.steps) == list(range(1, STEPS + 1))
    for row in whole.steps.values():
        assert set(METRICS) <= row.keys(), set(METRICS) - row.keys()
        assert_finite(row)


def test_every_metric_is_documented(whole):
    assert not undocumented(name for row in whole.metrics for name in row)


def test_every_process_has_a_log_file(whole):
    logs = {path.stem: path.read_text(encoding="utf-8") for path in (whole.newest / "logs").glob("*.log")}
    processes = {f"{role}-{rank}" for role in ("actor", "critic", "rollout") for rank in range(2)}
    assert {"driver", "reward-0", *processes} <= logs.keys()
    assert all(f"{name} begins, pid" in text for name, text in logs.items())
    rows = [line for line in logs["driver"].splitlines() if "megarl.tracking.console: step " in line]
    assert len(rows) == STEPS, "one line per step"
    assert "driver ends" in logs["driver"]


def test_validation_before_training_at_its_frequency_and_after_the_last_step(whole):
    name = "val-core/arithmetic/reward/mean@1"
    validated = {int(row["step"]): row[name] for row in whole.metrics if name in row}
    assert list(validated) == [0, 2, 4, 5]
    for step, value in validated.items():
        answers = read_jsonl(whole.folder / "validation" / f"{step}.jsonl")
        assert len(answers) == 20
        assert value == pytest.approx(sum(answer["score"] for answer in answers) / 20, rel=1e-6)
    assert whole.summary["val_accuracy_before"] == validated[0]
    assert whole.summary["val_accuracy_after"] == validated[5]


def test_metrics_agree_with_the_dumped_responses(whole):
    for step, row in whole.steps.items():
        answers = read_jsonl(whole.folder / "rollouts" / f"{step}.jsonl")
        assert len(answers) == SAMPLES and {answer["step"] for answer in answers} == {step}
        assert all({"input", "output", "gts", "score", "step", "exact"} <= answer.keys() for answer in answers)
        scores = [answer["score"] for answer in answers]
        assert row["critic/score/mean"] == pytest.approx(sum(scores) / SAMPLES, rel=1e-6)
        assert row["critic/score/max"] == max(scores) and row["critic/score/min"] == min(scores)
        for pair in zip(answers[::2], answers[1::2], strict=True):  # responses to one prompt are adjacent
            assert len({answer["input"] for answer in pair}) == 1
        a, b = map(int, re.fullmatch(r"What is (\d) \+ (\d)\?", answers[0]["input"]).groups())
        assert answers[0]["gts"] == str(a + b)


def test_reference_is_frozen_and_the_kl_coefficient_adapts(whole):
    rows = list(whole.steps.values())
    assert rows[0]["actor/reward_kl_penalty"] == 0 and rows[0]["actor/reward_kl_penalty_coeff"] == 0.001
    assert abs(rows[-1]["actor/reward_kl_penalty"]) > 1e-4
    for row, following in pairwise(rows):
        # Ziegler et al. 2019, section 2.2
        error = min(max(row["actor/reward_kl_penalty"] / TARGET_KL - 1, -0.2), 0.2)
        expected = row["actor/reward_kl_penalty_coeff"] * (1 + error * SAMPLES / HORIZON)
        assert following["actor/reward_kl_penalty_coeff"] == pytest.approx(expected, rel=1e-12)


def test_engine_generates_with_the_weights_of_each_step(whole):
    for row in whole.steps.values():
        assert row["training/rollout_probs_diff_max"] < 1e-5
        assert row["weight_sync/bytes"] > 0
    first, *later = whole.steps.values()
    assert first["training/rollout_mismatch_excess"] < 0.01
    assert not any("training/rollout_mismatch_excess" in row for row in later)


def test_rank_balance_is_recorded_and_reported(whole):
    """The actor has one data-parallel rank of two processes; the critic has two data-parallel ranks."""
    balance = read_balance(whole.newest / "balance.jsonl")
    assert list(balance) == list(whole.steps)
    for step, row in whole.steps.items():
        (tokens,), work = balance[step]["actor/tokens"], balance[step]["critic/work"]
        assert tokens == row["global_seqlen/mean"] == sum(balance[step]["critic/tokens"])
        assert len(work) == 2 and sum(work) == pytest.approx(2, abs=2e-3)
        for role, verb in (("actor", "update_actor"), ("actor", "compute_log_prob"), ("critic", "update_critic")):
            busy = balance[step][f"{role}/{verb}_s"]
            assert len(busy) == len(balance[step][f"{role}/tokens"]) and min(busy) > 0
        assert max(balance[step]["critic/update_critic_s"]) < row["timing_s/update_critic"]
    maps = balance_maps(read_run(whole.newest).balance)
    assert maps["critic/update_critic_s"]["steps"] == list(whole.steps) and "actor/tokens" not in maps


def test_summary_has_all_figures(whole):
    summary = whole.summary
    assert summary["steps"] == STEPS
    for name in ("train_seconds", "wall_seconds", "rollout_tokens_per_s", "update_tokens_per_s"):
        assert summary[name] > 0
    assert summary["wall_seconds"] > summary["train_seconds"]
    assert (whole.folder / summary["hf_dir"] / "config.json").is_file() and Path(summary["report"]).is_file()


def test_report_is_self_contained(whole):
    addresses: list[str] = []

    class Page(HTMLParser):
        def handle_starttag(self, tag, attrs):
            addresses.extend(value or "" for name, value in attrs if name in ("src", "href", "action", "srcset"))

    text = (whole.newest / "report.html").read_text(encoding="utf-8")
    Page().feed(text)
    assert [address for address in addresses if not address.startswith(("#", "data:"))] == []
    (packed,) = re.findall(r'<script id="data" type="text/plain">([^<]+)</script>', text)
    data = json.loads(gzip.decompress(base64.b64decode(packed)))
    (run,) = data["runs"]
    assert run["status"] == "finished" and run["metrics"]["critic/score/mean"]["n"] == STEPS
    assert "adv_estimator" in " ".join(row["key"] for row in data["config"]) and run["purpose"]
    assert {"torch", "command"} <= {row["key"] for row in data["environment"]}


def test_sampled_responses_have_values_per_token(whole):
    for step in whole.steps:
        for answer in read_jsonl(whole.newest / "samples" / "train" / f"{step}.jsonl"):
            tokens = TokenValues.decode(answer["tokens"], len(answer["output"]))
            assert tokens is not None and len(tokens.characters) == answer["response_length"]
            assert set(tokens.columns) == {column.name for column in TOKEN_COLUMNS}
            assert abs(tokens.columns["difference"]).max() < 1e-4 and tokens.columns["log_prob"].max() <= 0


def test_timeline_shows_every_phase_on_every_rank(whole):
    path = whole.newest / "timeline" / "trace.json"
    events = json.loads(path.read_text(encoding="utf-8"))
    assert events == read_trace(whole.newest), "complete, one event per line"
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    bars = [(names[event["pid"]], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    counts = Counter((process, name) for process, name, *_ in bars)
    for rank in range(2):
        for role, verb in (("actor", "update_actor"), ("actor", "compute_log_prob"), ("critic", "update_critic")):
            assert counts[f"{role} rank {rank}", verb] == STEPS
        for span in ("forward", "backward", "optimizer step", "all_reduce", "export_bucket"):
            assert counts[f"actor rank {rank}", span] > 0, span
        for verb in ("open_transfer", "import_bucket"):
            assert counts[f"rollout rank {rank}", verb] > 0
    assert counts["agents rank 0", "dense"] == counts["agents rank 0", "request"] >= STEPS * SAMPLES
    # Clocks are aligned: the spans of the ranks lie within the driver's phase.
    updates = [(process, start, start + length) for process, name, start, length in bars if name == "update_actor"]
    phases = [(start, end) for process, start, end in updates if process == "driver"]
    for process, start, end in updates:
        assert process == "driver" or any(first <= start and end <= last for first, last in phases)
    numbers = {event["name"] for event in events if event["ph"] == "C"}
    assert {"memory MiB", "replica 0 requests", "replica 1 requests", "requests waiting"} <= numbers


def test_profile_of_the_configured_step_and_rank(whole):
    (profile,) = (whole.newest / "profile").iterdir()
    assert profile.name == f"actor-1-step{PROFILED_STEP}.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names and any(str(name).startswith("Optimizer.step") for name in names)


def test_no_file_of_the_run_has_a_secret_or_is_readable_by_others(whole):
    """Checkpoints, logs, report and console output of a run that got a key, a password and a variable."""
    made_by_test = {whole.folder, whole.root.parent, whole.root, whole.root / "checkpoints"}
    paths = [path for path in whole.folder.rglob("*") if not path.is_symlink() and path not in made_by_test]
    files = [path for path in paths if path.is_file()]
    places = {path.parent.name for path in files}
    assert {"checkpoints", "actor", "critic", "logs", "train", "hf", "rollouts", "validation"} <= places
    for path in files:
        contents = unpacked(path)
        found = [secret for secret in (KEY, PASSWORD, FROM_ENVIRONMENT) if secret.encode() in contents]
        assert not found, f"{path} has {found}"
    open_to_others = {
        str(path.relative_to(whole.folder)): oct(stat.S_IMODE(path.stat().st_mode))
        for path in paths
        if stat.S_IMODE(path.stat().st_mode) != (0o700 if path.is_dir() else 0o600)
        and not (path.parent == whole.folder and path.name.startswith("output-"))  # of the test
    }
    assert open_to_others == {}
    stored = (whole.newest / "config.yaml").read_text(encoding="utf-8")
    assert f"access_token: ${{oc.env:{KEY_VARIABLE}}}" in stored and "api_key: <redacted>" in stored


def unpacked(path):
    """Return the content of a file, with that of compressed parts."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(content)
    if path.name == "report.html":
        packed = re.findall(rb'<script id="data" type="text/plain">([^<]+)</script>', content)
        content += b"".join(gzip.decompress(base64.b64decode(part)) for part in packed)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            content += b"".join(map(archive.read, archive.namelist()))
    return content


def test_old_checkpoints_are_removed(whole):
    root = whole.root / "checkpoints"
    assert sorted(path.name for path in root.glob("global_step_*")) == [f"global_step_{step}" for step in (3, 4, 5)]
    assert [(root / f"global_step_{step}" / "critic").is_dir() for step in (3, 4, 5)] == [False, True, True]
    assert (root / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8") == "5\n"


def test_training_continues_after_a_failed_save_on_a_full_disk(whole, whole_run):
    if not os.path.ismount(whole.root / "checkpoints"):
        pytest.skip("no permission to mount a file system")
    output = " ".join(whole_run.output.split())
    assert f"the checkpoint of step {FULL_IN_STEP} was not saved" in output and "No space left on device" in output
    assert re.search(rf"Training continues; kept: \S*global_step_{FULL_IN_STEP - 1}\b", output), output
    failed = {step: row["checkpoint/failed_saves"] for step, row in whole.steps.items() if step > 1}
    assert failed == dict.fromkeys(range(2, STEPS + 1), 1.0) | {FULL_IN_STEP: 0.0}
    assert not [path.name for path in (whole.root / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.release(twin="tests/e2e/test_e2e_lora.py::test_resume_in_another_layout_continues_exactly")
def test_resume_in_another_layout_is_equal_within_rounding_and_survives_a_rank_killed_during_save(
    arguments, whole, start, tmp_path
):
    """Resume the second last checkpoint, actor TP2 to PP2 and critic DP2 to TP2; then a rank dies during the save."""
    saved = tmp_path / "outputs" / "ppo" / "checkpoints"
    shutil.copytree(whole.root / "checkpoints" / f"global_step_{STEPS - 1}", saved / f"global_step_{STEPS - 1}")
    (saved / POINTER).write_text(f"{STEPS - 1}\n", encoding="utf-8")
    dying = {"PYTHONPATH": f"{DYING_WRITER}:{ROOT}", "MEGARL_E2E_DIE_WRITING": "/actor/__1_0.distcp", ENVIRONMENT: "1"}
    run = start(*arguments, *OTHER_LAYOUT, folder=tmp_path, env=dying, warm=True)
    assert run.wait() == 1, run.output
    assert run.remaining() == []
    assert re.search(r"actor rank 1 \(pid \d+ on [\d.]+\) died in save_checkpoint", run.output), run.output

    last, expected = RunFiles(tmp_path, "ppo").steps[STEPS], reproducible(whole.steps[STEPS])
    layout_metrics = ("global_seqlen/", "weight_sync/")  # depend on the layout
    expected = {name: value for name, value in expected.items() if not name.startswith(layout_metrics)}
    assert {name: last[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    resumed, uninterrupted = (
        read_jsonl(files.folder / "rollouts" / f"{STEPS}.jsonl") for files in (RunFiles(tmp_path, "ppo"), whole)
    )
    advantages = [[answer.pop("advantage") for answer in answers] for answers in (resumed, uninterrupted)]
    assert advantages[0] == pytest.approx(advantages[1], rel=1e-5, abs=1e-6)
    assert resumed == uninterrupted

    (partial,) = saved.glob(f".global_step_{STEPS}.*")
    assert (partial / "actor" / "__1_0.distcp").stat().st_size > 0 and not (partial / MANIFEST).exists()
    store = CheckpointStore(saved)
    assert store.resolve("auto", None, ("actor", "critic")) == saved / f"global_step_{STEPS - 1}"


def test_exported_policy_repeats_the_last_validation_with_transformers(whole):
    tokenizer = AutoTokenizer.from_pretrained(whole.folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(whole.folder / "hf", dtype=torch.float32).eval()
    before, after = (read_jsonl(whole.folder / "validation" / f"{step}.jsonl") for step in (0, STEPS))
    assert [answer["output"] for answer in before] != [answer["output"] for answer in after]
    for answer in after[:6]:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": answer["input"]}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, pad_token_id=0
        )
        assert tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True) == answer["output"]


def test_killed_run_resumes_bit_exact(arguments, whole, start, tmp_path):
    paused = tmp_path / "paused"
    pause_at = (KILLED_IN_STEP - 1) * SAMPLES + SAMPLES // 2  # half of the responses of the step are scored
    arguments = [*arguments, *IN_BACKGROUND]  # the uninterrupted run waits for each save
    killed = start(*arguments, folder=tmp_path, env={PAUSE_AT: str(pause_at), PAUSED: str(paused)}, warm=True)
    killed.wait_until(paused.exists)
    # Ray and all roles, with their process groups connected; the last command is that of engines and agent runners.
    commands = ("gcs_server", "raylet/raylet", "ray::WorkerProcess", "ray::ServingWorkerProcess")
    assert_on_loopback(listening_processes(killed.processes()), *commands)
    killed.signal_group(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert killed.remaining() == []
    assert list(RunFiles(tmp_path, "ppo").steps) == list(range(1, KILLED_IN_STEP))

    earlier = {"reward.custom": "custom", "reward.num": "reward_model.num", "reward.max": "reward_model.max"}
    for new, old in earlier.items():
        arguments = [old + words.removeprefix(new) if words.startswith(new) else words for words in arguments]
    resumed = start(*arguments, folder=tmp_path)  # with the names of keys that an earlier version had
    assert resumed.wait() == 0, resumed.output
    assert "config: custom_reward_function.name is reward.custom_reward_function.name=dense" in resumed.output
    again = RunFiles(tmp_path, "ppo")
    # The save of the previous step may not have finished; the one before it has.
    assert STEPS - again.summary["steps"] in (KILLED_IN_STEP - 2, KILLED_IN_STEP - 1)
    last = again.steps[STEPS]
    assert last["checkpoint/failed_saves"] == 0
    assert last["checkpoint/gb"] > 0 and last["checkpoint/write_s"] > 0 and last["checkpoint/blocked_s"] > 0
    assert_equal_runs(again, whole)


def assert_equal_files(actual, expected):
    """Compare texts, or arrays except weight versions, which a resumed run counts from 0 again."""
    if actual.suffix != ".npz":
        assert actual.read_text(encoding="utf-8") == expected.read_text(encoding="utf-8")
        return
    with np.load(actual) as actual_arrays, np.load(expected) as expected_arrays:
        assert set(actual_arrays) == set(expected_arrays)
        for name in set(actual_arrays) - {"weight_versions"}:
            np.testing.assert_array_equal(actual_arrays[name], expected_arrays[name])


def assert_equal_runs(actual, expected):
    """Check that all metrics, responses and final weights are equal, bit for bit."""
    rows, expected_rows = ([reproducible(row) for row in run.metrics] for run in (actual, expected))
    assert [row["step"] for row in rows] == [row["step"] for row in expected_rows]
    for row, other in zip(rows, expected_rows, strict=True):
        differing = [name for name in row.keys() | other.keys() if row.get(name) != other.get(name)]
        assert not differing, f"step {row['step']}: {[(name, row.get(name), other.get(name)) for name in differing]}"
    for kind in ("rollouts", "validation"):
        files, expected_files = ({path.name for path in (run.folder / kind).glob("*.*")} for run in (actual, expected))
        assert files == expected_files and files
        for path in (actual.folder / kind).glob("*.*"):
            assert_equal_files(path, expected.folder / kind / path.name)
    weights, expected_weights = (load_file(run.folder / "hf" / "model.safetensors") for run in (actual, expected))
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


@pytest.mark.release(
    twin="tests/e2e/test_e2e_evaluate.py::test_checkpoint_and_folder_give_equal_responses_even_if_a_replica_dies"
)
def test_evaluation_of_the_latest_checkpoint_repeats_the_last_validation(dense_reward, task, whole, start):
    run = start(
        *("--config-name", "quickstart_evaluate", f"data.val_files={task}/data/test.parquet", *dense_reward),
        *(f"actor_rollout_ref.model.path={whole.root}/latest", "trainer.validation_data_dir=evaluated"),
        *("actor_rollout_ref.rollout.val_kwargs.n=1", "actor_rollout_ref.rollout.val_kwargs.temperature=0"),
        job="evaluate",
    )
    assert run.wait() == 0, run.output
    answers = (read_jsonl(path / f"{STEPS}.jsonl") for path in (run.folder / "evaluated", whole.folder / "validation"))
    assert next(answers) == next(answers)


@pytest.mark.release(twin="tests/trainer/test_trainer_callbacks.py::test_validation_before_training")
def test_val_only_evaluates_the_exported_policy_without_training(small, dense_reward, whole, start):
    run = start(
        *("--config-name", "quickstart", *small, *dense_reward, "trainer.experiment_name=validation"),
        *(f"actor_rollout_ref.model.path={whole.folder}/hf", "actor_rollout_ref.rollout.replicas=1"),
        *("trainer.val_only=true", "trainer.save_freq=1", "trainer.validation_data_dir=validation"),
    )
    assert run.wait() == 0, run.output
    files = RunFiles(run.folder, "validation")
    (row,) = files.metrics
    assert row["step"] == 0
    assert row["val-core/arithmetic/reward/mean@1"] == whole.steps[STEPS]["val-core/arithmetic/reward/mean@1"]
    answers, last = (
        read_jsonl(run.folder / "validation" / "0.jsonl"), read_jsonl(whole.folder / "validation" / f"{STEPS}.jsonl")
    )  # fmt: skip
    assert [answer["output"] for answer in answers] == [answer["output"] for answer in last]
    assert files.summary["steps"] == 0 and not (files.root / "checkpoints").exists()
