"""The command line: output, exit codes and imports."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import resource
import signal
import subprocess
import sys
import types
import urllib.request
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from support.interrupts import restore_interrupts

from megarl import cli
from megarl.base.commands import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from megarl.base.errors import ConfigError, DataError, RewardError, RewardFunctionError, WorkerError
from megarl.base.run_writer import RUN_WRITER
from megarl.config import EvaluateConfig, SFTConfig, TrainConfig
from megarl.config.compose import to_yaml
from megarl.config.stored import stored_config
from megarl.ops.jobs import command
from megarl.tracking import Console
from megarl.trainer.jobs import early_checks
from megarl.trainer.records.reporting import RunReporter
from megarl.trainer.state.checkpoint_manifest import ID_FILE

ROOT = Path(__file__).resolve().parents[1]


class FakeJob:
    """Replaces the jobs: records configs and output folders, and can fail or write a score."""

    def __init__(self):
        self.calls: list[tuple[Any, Path]] = []
        self.failures: list[BaseException] = []
        self.scores: list[float] = []

    def run(self, config, output_dir):
        self.calls.append((config, output_dir))
        if self.failures:
            raise self.failures.pop(0)
        if self.scores:
            row = {"step": 1, "critic/score/mean": self.scores.pop(0)}
            (output_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


@pytest.fixture
def job(monkeypatch, tmp_path):
    fake = FakeJob()
    module = types.ModuleType("megarl_fake_job")
    module.run = fake.run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megarl_fake_job", module)
    monkeypatch.setattr("megarl.trainer.jobs.early_checks.check_early", lambda config: None)
    for name, entry in cli.JOBS.items():
        monkeypatch.setitem(cli.JOBS, name, entry._replace(module="megarl_fake_job"))
    monkeypatch.chdir(tmp_path)
    return fake


def quickstart(*arguments):
    return ["--config-name", "quickstart", *arguments]


def test_job_gets_a_typed_config_and_a_new_output_folder(job, tmp_path):
    assert cli.main(["train", *quickstart("trainer.seed=7")]) == 0
    ((config, folder),) = job.calls
    assert isinstance(config, TrainConfig) and config.trainer.seed == 7
    assert folder.parent == tmp_path / "outputs" / "quickstart"
    assert config.trainer.default_local_dir == "outputs/quickstart/checkpoints"
    assert yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["data"]["seed"] == 7
    provenance = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert (provenance["job"], provenance["config_name"], provenance["overrides"]) == (
        "train",
        "quickstart",
        ["trainer.seed=7"],
    )
    differences = {difference["key"]: difference for difference in provenance["differences"]}
    assert differences["trainer.seed"] == {"key": "trainer.seed", "value": 7, "default": 1, "origin": "command line"}
    assert differences["trainer.n_gpus_per_node"]["origin"] == "file"
    assert differences["data.seed"]["origin"] == "derived"
    assert provenance["versions"]["torch"] and provenance["git"]["megarl"]["commit"]


def test_user_code_of_the_driver_reaches_servers_of_this_machine_without_a_proxy(job, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "corp.example")
    assert cli.main(["train", *quickstart()]) == 0
    assert urllib.request.proxy_bypass("127.0.0.1") and urllib.request.proxy_bypass("localhost")
    assert urllib.request.proxy_bypass("corp.example") and not urllib.request.proxy_bypass("10.0.0.5")


def test_sft_job_gets_its_config_class(job):
    assert cli.main(["sft", "--config-name", "quickstart_sft"]) == 0
    assert isinstance(job.calls[0][0], SFTConfig)


def test_evaluate_accepts_a_checkpoint_folder(job, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    arguments = ["--config-name", "quickstart_evaluate", f"actor_rollout_ref.model.path={tmp_path}/checkpoints"]
    assert cli.main(["evaluate", *arguments]) == 0
    assert isinstance(job.calls[0][0], EvaluateConfig)


def test_sweep_runs_have_separate_folders(job):
    assert cli.run_job("train", quickstart("--multirun", "trainer.seed=1,2")) == 0
    assert [config.trainer.seed for config, _ in job.calls] == [1, 2]
    for config, folder in job.calls:
        assert config.trainer.default_local_dir == str(folder / "checkpoints")
    assert len({folder for _, folder in job.calls}) == 2


OTHER_TEXT = pytest.mark.release(twin="tests/test_cli.py::test_texts_of_a_sweep_keep_their_characters")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        pytest.param(("trainer.experiment_name=2026_11_27,1e3",), ["2026_11_27", "1e3"], marks=OTHER_TEXT),
        (("trainer.experiment_name=choice(2026_11_27,~/x)",), ["2026_11_27", "~/x"]),
        pytest.param(("trainer.experiment_name=1_0", "trainer.seed=1"), ["1_0"], marks=OTHER_TEXT),
        (("hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "trainer.experiment_name=choice(1_0)"), ["1_0"]),
    ],
)
def test_texts_of_a_sweep_keep_their_characters(job, overrides, names):
    job.scores = [1.0, 2.0]
    assert cli.run_job("train", quickstart("--multirun", *overrides)) == 0
    assert [config.trainer.experiment_name for config, _ in job.calls] == names
    stored = [yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")) for _, folder in job.calls]
    assert [config["trainer"]["experiment_name"] for config in stored] == names


def test_sweep_with_a_wrong_value_starts_no_run(job, capsys):
    assert cli.run_job("train", quickstart("-m", "trainer.seed=1,x")) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert not job.calls and "trainer.seed=x" in error and "[config.wrong-type]" in error


def test_sweep_continues_after_a_failed_run(job, capsys):
    job.failures = [DataError("column prompt is missing", code="data.missing-column")]
    assert cli.run_job("train", quickstart("-m", "trainer.seed=1,2")) == EXIT_FAILED
    assert len(job.calls) == 2 and "[data.missing-column]" in capsys.readouterr().err


def test_sweep_table_lists_scores_and_failures(job, capsys):
    job.scores = [0.25, 0.75, 0.5]
    job.failures = [DataError("column prompt is missing", code="data.missing-column")]
    assert cli.run_job("train", quickstart("-m", "trainer.seed=1,2,3,4")) == EXIT_FAILED
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[-6:-1]] == [
        ["run", "trainer.seed", "critic/score/mean"],
        ["0", "1", "failed:", "column", "prompt", "is", "missing", "[data.missing-column]"],
        ["1", "2", "0.25"],
        ["2", "3", "0.75", "<-", "best"],
        ["3", "4", "0.5"],
    ]
    folder = job.calls[0][1].parent
    assert lines[-1] == f"sweep: {folder.relative_to(Path.cwd())}/comparison.html"
    assert json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["runs"][0]["value"] is None


@pytest.mark.parametrize(
    ("full_from", "full_until"), [(0, 2), (0, 3), (2, 3)], ids=["until the second run", "always", "from the second run"]
)
def test_a_sweep_survives_a_full_disk_under_its_folder(
    job,
    monkeypatch,
    caplog,
    full_from,
    full_until,
):
    """Every file of more than a line is refused; the metrics of a fake run are one line."""
    job.scores = [0.25, 0.75]
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    run, before = job.run, signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def run_job(config, output_dir):
        run(config, output_dir)
        limit_file_size()

    def limit_file_size():
        is_full = full_from <= len(job.calls) < full_until
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 if is_full else hard, hard))

    monkeypatch.setattr(sys.modules["megarl_fake_job"], "run", run_job)
    output = io.StringIO()
    limit_file_size()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = cli.run_job("train", quickstart("--multirun", "trainer.seed=1,2"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)
        RUN_WRITER.reset()
    folder, printed = job.calls[0][1].parent, output.getvalue()
    assert code == 0 and "0.75 <- best" in printed and "Traceback" not in printed, printed
    early = ["0/config.yaml", "0/run.json"]
    late = ["sweep.json", "sweep.csv", "comparison.html"]
    present = [name for name in [*early, *late] if (folder / name).exists()]
    if full_until == 2:
        assert present == [*early, *late]
        assert json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["best"] == "1"
    else:
        assert present == (early if full_from else [])
        assert "files of the run stay incomplete" in caplog.text and f"{folder.name}/sweep.json" in caplog.text
        assert "the comparison could not be written" in printed


def test_optuna_ignores_failed_trials(job, capsys):
    job.scores = [-3.0, -2.0]
    job.failures = [DataError("column prompt is missing", code="data.missing-column")]
    optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")
    assert cli.run_job("train", quickstart("-m", *optuna, "trainer.seed=range(1,99)")) == EXIT_FAILED
    best = yaml.safe_load((job.calls[0][1].parent / "optimization_results.yaml").read_text(encoding="utf-8"))
    assert best["best_value"] == -2.0 and len(job.calls) == 3


def test_megarl_error_is_printed_without_traceback(job, capsys):
    for error, code in (
        (DataError("column prompt is missing", code="data.missing-column"), EXIT_BAD_INPUT),
        (RewardFunctionError("no function", code="x.one"), EXIT_BAD_INPUT),
        (RewardError("the function raised", code="x.two"), EXIT_FAILED),
        (WorkerError("rank 1 is gone", code="x.three"), EXIT_FAILED),
    ):
        job.failures = [error]
        assert cli.run_job("train", quickstart()) == code
        assert capsys.readouterr().err == f"{error}\n"


def test_unexpected_exception_keeps_its_traceback(job, capsys):
    job.failures = [ValueError("a bug")]
    assert cli.run_job("train", quickstart()) == EXIT_FAILED
    error = capsys.readouterr().err
    assert "Traceback" in error and error.endswith("ValueError: a bug\n")


def test_ctrl_c_exits_with_the_interrupt_code(job):
    job.failures = [KeyboardInterrupt()]
    assert cli.run_job("train", quickstart()) == EXIT_INTERRUPTED


def test_wrong_config_exits_with_2_and_creates_no_file(job, tmp_path, capsys):
    assert cli.run_job("train", quickstart("trainer.seeed=1")) == EXIT_BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == (
        "The configuration has a problem:\n"
        "  trainer.seeed=1\n"
        "      unknown key; did you mean trainer.seed? [config.unknown-key]\n"
    )
    assert not job.calls and not (tmp_path / "outputs").exists()


def test_printing_the_config_runs_no_job(job, tmp_path, capsys):
    assert cli.run_job("train", ["trainer.seed=3", "--cfg", "job", *quickstart("algorithm.lam=0.9")]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["seed"] == 3 and printed["algorithm"]["lam"] == 0.9
    assert printed["actor_rollout_ref"]["actor"]["clip_ratio_low"] == 0.2
    assert not job.calls and not (tmp_path / "outputs").exists()


def model_folder(folder, **changes):
    folder.mkdir()
    shape = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps({**shape, **changes}), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("key", "value", "changes", "code"),
    [
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", 4, {}, "layout.tp-heads"),
        ("critic.megatron.pipeline_model_parallel_size", 4, {}, "layout.pp-layers"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", 4, {}, "engine.one-device"),
        (
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
            2,
            {"num_key_value_heads": 1},
            "layout.tp-heads",
        ),
    ],
)
def test_layout_is_checked_against_the_model(
    key,
    value,
    changes,
    code,
    job,
    tmp_path,
    capsys,
):
    path = model_folder(tmp_path / "model", **changes)
    devices = ("trainer.n_gpus_per_node=4", "critic.megatron.data_parallel_size=auto")
    arguments = quickstart(*devices, f"actor_rollout_ref.model.path={path}", f"{key}={value}")
    assert cli.run_job("train", arguments) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert f"{key}={value}" in error and f"[{code}]" in error and not job.calls


def test_an_inherited_size_that_does_not_fit_the_critics_model_names_both_keys(job, tmp_path, capsys):
    policy, critic = model_folder(tmp_path / "policy"), model_folder(tmp_path / "critic", num_key_value_heads=1)
    key = "megatron.tensor_model_parallel_size"
    arguments = quickstart(
        f"actor_rollout_ref.model.path={policy}", f"critic.model.path={critic}", f"critic.{key}=auto"
    )
    assert cli.run_job("train", arguments) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"critic.{key}=2 must divide the model's num_key_value_heads=1")
    assert f"actor_rollout_ref.actor.{key}; set critic.{key}" in error and "[layout.tp-heads]" in error


def test_unknown_architecture_is_refused_before_the_job(job, tmp_path, capsys):
    path = model_folder(tmp_path / "model", architectures=["MambaForCausalLM"])
    assert cli.run_job("train", quickstart(f"actor_rollout_ref.model.path={path}")) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert "[model.no-weight-map]" in error and "MambaForCausalLM" in error and "qwen2, qwen2_5_vl, qwen2_moe" in error


def test_usage_lists_every_job_and_command_once(capsys):
    assert cli.main([]) == EXIT_BAD_INPUT
    without_arguments = capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert usage == without_arguments
    listed = re.findall(r"^  ([a-z-]+) {2,}\S", usage, re.MULTILINE)
    assert listed == [*cli.JOBS, *cli.COMMANDS]


def test_unknown_command_suggests_the_nearest(capsys):
    assert cli.main(["trian"]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert "megarl trian: unknown command. Did you mean train?" in error


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_help_of_every_command_names_the_command(name, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0 and f"usage: megarl {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("job", "name", "files"),
    [
        ("train", "quickstart", "train_files"),
        ("sft", "quickstart_sft", "train_files"),
        ("evaluate", "quickstart_evaluate", "val_files"),
    ],
)
def test_printing_the_config_imports_no_heavy_package(job, name, files):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['x', '{job}', '--config-name', '{name}', '--cfg', 'job']\n"
        "try:\n"
        "    runpy.run_module('megarl', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'ray', 'megatron', 'transformers', 'numpy', 'pyarrow', 'tensordict', 'sglang', 'wandb'}\n"
        "imported = heavy & set(sys.modules)\n"
        "assert not imported, imported\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout)["data"][files]


def test_wrong_key_in_a_subprocess():
    command = [sys.executable, "-m", "megarl", "train", "--config-name", "quickstart", "--cfg", "job", "critic.lr=1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and result.stdout == ""
    assert "critic.lr=1" in result.stderr and "critic.optim.lr? [config.unknown-key]" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), ConfigError("needs plotly", code="a.b"), KeyError("metrics")],
    ids=lambda error: type(error).__name__,
)
def test_report_that_cannot_be_written_does_not_fail_a_finished_run(tmp_path, monkeypatch, capsys, error):
    monkeypatch.setattr("megarl.ops.report.compare_runs", mock.Mock(side_effect=error))
    command._compare(tmp_path, [], minimize=False)
    message = capsys.readouterr().err
    assert str(error) in message and f"megarl report {tmp_path}" in message


@pytest.mark.parametrize("shared", ["hydra.run.dir", "trainer.default_local_dir", "trainer.hf_export_dir"])
def test_two_concurrent_runs_share_no_folder(job, tmp_path, capsys, shared):
    """The second one writes nothing, is told the holder and its key, and ends with the code of a wrong input."""
    arguments = ["trainer.save_freq=1", f"{shared}={tmp_path}/shared"]
    codes: list[int] = []
    begin = job.run

    def run_second(config, output_dir):
        begin(config, output_dir)
        (output_dir / ID_FILE).write_text("id-of-the-first", encoding="utf-8")  # as a job does
        before = {path: path.read_bytes() for path in output_dir.rglob("*.json")}
        name = "trainer.experiment_name=second"
        codes.append(cli.main(["train", *quickstart(*arguments, name)]))
        assert {path: path.read_bytes() for path in output_dir.rglob("*.json")} == before

    sys.modules["megarl_fake_job"].run = run_second  # type: ignore[attr-defined]
    assert cli.main(["train", *quickstart(*arguments)]) == 0
    assert codes == [EXIT_BAD_INPUT] and len(job.calls) == 1
    error = capsys.readouterr().err
    assert f"quickstart in {job.calls[0][1]}, process " in error and ", run ID id-of-the-first" in error
    assert f"{shared}=<another folder>" in error and "[disk.folder-in-use]" in error
    assert not list(tmp_path.rglob("*run_lock"))


SECRETS = ("hunter2secret", "kwargs-key-1", "sk-abcdefghijklmnop1234", "env-secret-99")


def secret_overrides():
    """Overrides with secrets by key name, in an address, by form, and from the environment."""
    return [
        "actor_rollout_ref.rollout.multi_turn.search.url=http://me:hunter2secret@127.0.0.1:8000/retrieve",
        "+reward.custom_reward_function.reward_kwargs.api_key=kwargs-key-1",
        "+reward.custom_reward_function.reward_kwargs.header=sk-abcdefghijklmnop1234",
        "+reward.custom_reward_function.reward_kwargs.password=${oc.env:MEGARL_TEST_SECRET}",
    ]


def test_no_file_of_a_run_has_a_secret_or_is_readable_by_others(job, tmp_path, monkeypatch):
    """The job gets the values; config, Hydra's files, log, tracker config and run facts do not."""
    monkeypatch.setenv("MEGARL_TEST_SECRET", "env-secret-99")
    record = job.run

    def run(config, output_dir):
        record(config, output_dir)
        logging.getLogger("megarl").info("the judge answered 401 to kwargs-key-1 and env-secret-99")
        reporter = RunReporter(config.trainer, stored_config(config), output_dir, Console(quiet=True))
        (output_dir / "tracker_config.json").write_text(json.dumps(reporter.resolved), encoding="utf-8")
        (output_dir / "checkpoint_config.yaml").write_text(to_yaml(config), encoding="utf-8")

    sys.modules["megarl_fake_job"].run = run  # type: ignore[attr-defined]
    assert cli.main(["train", *quickstart(*secret_overrides())]) == 0
    ((config, folder),) = job.calls
    kwargs = config.reward.custom_reward_function.reward_kwargs
    assert (kwargs["api_key"], kwargs["password"]) == ("kwargs-key-1", "env-secret-99")
    files = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    assert {"config.yaml", "run.json", "driver.log"} <= {path.name for path in files}
    leaks = [
        (path, secret)
        for path in files
        for secret in SECRETS
        if secret in path.read_text(errors="replace", encoding="utf-8")
    ]
    assert leaks == []
    stored = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert stored["reward"]["custom_reward_function"]["reward_kwargs"]["password"] == "${oc.env:MEGARL_TEST_SECRET}"
    assert (
        stored["actor_rollout_ref"]["rollout"]["multi_turn"]["search"]["url"]
        == "http://<redacted>@127.0.0.1:8000/retrieve"
    )
    modes = {oct(path.stat().st_mode & 0o777) for path in files}
    assert modes == {"0o600"} and folder.stat().st_mode & 0o777 == 0o700


def test_a_stored_config_names_the_secrets_to_set_again(job, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MEGARL_TEST_SECRET", "env-secret-99")
    assert cli.main(["train", *quickstart(*secret_overrides())]) == 0
    folder = job.calls[0][1]
    again = ["train", "--config-dir", str(folder), "--config-name", "config"]
    assert cli.main(again) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert (
        "reward.custom_reward_function.reward_kwargs.api_key" in error
        and "actor_rollout_ref.rollout.multi_turn.search.url" in error
    )
    assert error.count("[config.redacted-secret]") == 3
    assert "reward.custom_reward_function.reward_kwargs.password" not in error
    values = [
        "reward.custom_reward_function.reward_kwargs.api_key=new",
        "reward.custom_reward_function.reward_kwargs.header=new",
        "actor_rollout_ref.rollout.multi_turn.search.url=null",
    ]
    assert cli.main([*again, *values]) == 0
    kwargs = job.calls[1][0].reward.custom_reward_function.reward_kwargs
    assert (kwargs["api_key"], kwargs["password"]) == ("new", "env-secret-99")


def test_ctrl_c_after_the_run_shows_no_traceback(tmp_path):
    """Libraries clean up at the exit of the process."""
    code = (
        "import atexit, os, signal, sys\n"
        "from megarl.ops.jobs import command\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "command.run_composed = lambda *arguments: (0, None)\n"
        "sys.exit(command.run_job('train', ['--config-name', 'quickstart']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, preexec_fn=restore_interrupts
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_missing_plotly_is_a_warning_before_the_job(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "plotly", None)
    early_checks.check_packages(SFTConfig())
    assert "plotly" in caplog.text
