"""Files and summary of a run, from steps with fixed seconds."""

import io
import json
import time

import pytest
from rich.console import Console as RichConsole

from megarl.tracking import Console, read_metrics
from megarl.trainer.records.reporting import RunReporter


@pytest.fixture
def reporter(train_config, tmp_path):
    def make(name="run", resumed_from=None, **more):
        folder = tmp_path / "outputs" / name
        folder.mkdir(parents=True)
        console = Console(output=RichConsole(file=io.StringIO(), width=120))
        config = train_config({"trainer.logger": ["console"]}).trainer
        return RunReporter(config, {"a": {"b": 1}}, folder, console, resumed_from, **more)

    return make


def step(reporter, number, seconds, **metrics):
    reporter.timer.seconds = dict(seconds)
    tokens = {phase: 50 if phase == "gen" else 200 for phase in seconds}
    reporter.log_step(number, {"critic/score/mean": 0.5, **metrics}, tokens)


def test_console_tells_of_repeated_passes(reporter):
    run = reporter()
    limits = {"actor/update_micro_batch_limit": 8192.0, "actor/forward_micro_batch_limit": 16384.0}
    step(run, 1, {"step": 1.0}, **{"actor/out_of_memory": 2.0, "ref/out_of_memory": 0.0}, **limits)
    step(run, 2, {"step": 1.0}, **{"actor/out_of_memory": 0.0}, **limits)
    text = " ".join(run.console.output.file.getvalue().split())
    assert text.count("out of device memory") == 1
    assert "step 1: actor ran out of device memory 2 times" in text and "update 8,192, forward 16,384" in text


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ({"actor/empty_steps": 2.0, "actor/truncated_masked_fraction": 1.0}, "mask_truncated_completions"),
        ({"critic/empty_steps": 1.0, "rollout_corr/rollout_rs_masked_fraction": 1.0}, "rollout_rs"),
        ({"actor/empty_steps": 1.0, "agent/failed": 3.0, "reward/failed": 1.0}, "3 conversations failed; 1 rewards"),
        ({"actor/grad_norm": 0.0, "critic/score/zero_variance_fraction": 1.0}, "score the same"),
        ({"actor/grad_norm": 0.5, "actor/empty_steps": 0.0, "actor/truncated_masked_fraction": 0.9}, None),
    ],
)
def test_console_warns_of_a_step_that_trains_nothing(reporter, metrics, named):
    run = reporter()
    step(run, 4, {"step": 1.0}, **metrics)
    _, *warnings = run.console.output.file.getvalue().split("step 4: ")
    assert len(warnings) == (named is not None)
    assert named is None or named in " ".join(warnings[0].split())


def test_the_summary_totals_the_steps(reporter, tmp_path):
    run = reporter()
    run.timer.seconds = {"testing": 9.0}
    run.log_validation(0, {"val-core/a/reward/mean@1": 0.25, "val-core/b/reward/mean@1": 0.75, "val-aux/x": 9.0})
    step(run, 1, {"step": 4.0, "gen": 2.0, "update_critic": 1.0})  # the critic warms up
    step(run, 2, {"step": 6.0, "gen": 3.0, "update_critic": 1.0, "update_actor": 2.0})
    step(run, 3, {"step": 5.0, "gen": 5.0, "update_critic": 1.0}, **{"val-core/a/reward/mean@1": 1.0})
    run.keep_samples(3, [{"input": "q", "output": "a", "gts": "a", "score": 1.0, "step": 3}], "train")
    assert (run.folder / "samples" / "train" / "3.jsonl").exists()
    summary = run.finish("/some/hf")
    assert (summary.val_accuracy_before, summary.val_accuracy_after) == (0.5, 1.0)
    assert (summary.steps, summary.train_seconds, summary.hf_dir) == (3, 15.0, "/some/hf")
    assert summary.rollout_tokens_per_s == pytest.approx(150 / 10)
    assert summary.update_tokens_per_s == pytest.approx(600 / 5)
    assert 0 < summary.wall_seconds < 60

    written = json.loads((tmp_path / "outputs" / "run" / "summary.json").read_text(encoding="utf-8"))
    assert written == json.loads((tmp_path / "outputs" / "summary.json").read_text(encoding="utf-8"))
    assert written["steps"] == 3 and written["report"] == str(run.folder / "report.html")
    # The metrics file is written although only the console tracker is configured.
    metrics = read_metrics(run.metrics_file)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert metrics[2]["timing_s/update_actor"] == 2.0
    assert metrics[2]["timing_per_token_ms/gen"] == pytest.approx(1000 * 3.0 / 50)


def test_supervised_fine_tuning_has_one_update_and_no_rollout(reporter):
    run = reporter()
    step(run, 1, {"step": 2.5, "update": 2.0})
    summary = run.finish(None)
    assert summary.update_tokens_per_s == pytest.approx(100.0)
    assert summary.rollout_tokens_per_s is None and summary.val_accuracy_before is None


def test_a_run_without_steps(reporter):
    """As with ``val_only``: there is no validation after a step."""
    run = reporter()
    run.log_validation(0, {"val-core/a/reward/mean@1": 0.25})
    summary = run.finish(None)
    assert (summary.val_accuracy_before, summary.val_accuracy_after, summary.steps) == (0.25, None, 0)
    assert run.accuracy == 0.25
    assert summary.update_tokens_per_s is None and summary.train_seconds == 0


def test_a_resumed_run_continues_the_metrics(reporter, tmp_path):
    first = reporter("first")
    for number in (1, 2, 3):
        step(first, number, {"step": 1.0, "gen": 0.5})
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / first.metrics_file.name).write_bytes(first.metrics_file.read_bytes())
    second = reporter("second", (checkpoint, 3))
    step(second, 4, {"step": 1.0, "gen": 0.5})
    assert second.finish(None).steps == 1
    assert [row["step"] for row in read_metrics(second.metrics_file)] == [1, 2, 3, 4]


def test_failed_phases_are_timed_too(reporter):
    run = reporter()
    with pytest.raises(RuntimeError), run.phase("step"), run.phase("gen"):
        raise RuntimeError("no")
    assert set(run.seconds) == {"step", "gen"}


def test_samples_of_an_older_run_are_moved_aside(reporter, tmp_path):
    first = reporter()
    first.keep_samples(1, [{"output": "old"}], "train")
    first.finish(None)
    again = RunReporter(first.config, {}, first.folder, first.console)
    assert not (first.folder / "summary.json").exists(), "the new run is not over"
    again.keep_samples(2, [{"output": "new"}], "train")
    assert [path.name for path in (first.folder / "samples" / "train").iterdir()] == ["2.jsonl"]
    assert (first.folder / "samples.old" / "train" / "1.jsonl").exists()


def test_without_a_validation_before_training_there_is_no_accuracy_before(reporter):
    run = reporter()
    step(run, 8, {"step": 1.0}, **{"val-core/a/reward/mean@1": 0.5})
    step(run, 16, {"step": 1.0}, **{"val-core/a/reward/mean@1": 0.75})
    summary = run.finish(None)
    assert (summary.val_accuracy_before, summary.val_accuracy_after) == (None, 0.75)


def test_a_resumed_run_has_the_accuracy_before_its_first_part(reporter, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    rows = [{"step": 0, "val-core/a/reward/mean@1": 0.25}, {"step": 1, "val-core/a/reward/mean@1": 0.5}]
    (checkpoint / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = reporter("second", (checkpoint, 1))
    step(run, 2, {"step": 1.0}, **{"val-core/a/reward/mean@1": 0.75})
    summary = run.finish(None)
    assert (summary.val_accuracy_before, summary.val_accuracy_after) == (0.25, 0.75)


def test_the_whole_run_counts_from_the_command(reporter):
    started = time.monotonic() - 75.0
    wall_seconds = reporter(started=started).finish(None).wall_seconds
    assert 75.0 <= wall_seconds <= time.monotonic() - started


def test_the_summary_names_the_reason_of_an_early_end(reporter):
    run = reporter(run_id="abc")
    run.finish(None, stopped="Ctrl-C")
    assert json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))["stopped"] == "Ctrl-C"
    assert f"{run.config.experiment_name}: ended early (Ctrl-C)" in run.console.output.file.getvalue()
    assert (run.folder / "run_id").read_text(encoding="utf-8") == "abc"
