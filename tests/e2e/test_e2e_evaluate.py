"""Evaluation from the command line: a model folder and a checkpoint with equal weights, on two data sources."""

from __future__ import annotations

import json
from collections import Counter
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deadly_reward import ROWS
from support.cli_runs import CliRun, RunFiles, read_jsonl

from megarl.convert.conversion import ConversionOptions, convert
from megarl.convert.open import open_source
from megarl.convert.source import MEGARL

N, STEP = 4, 7
DEADLY = Path(__file__).with_name("deadly_reward.py")


class EvaluationRun(NamedTuple):
    run: CliRun
    files: RunFiles
    metrics: dict[str, float]
    answers: list[dict[str, Any]]


@pytest.fixture(scope="module")
def evaluate(task, start, tmp_path_factory):
    """``evaluate(model, reward, step)``: four responses to each of 40 prompts of two data sources, in four batches."""
    data = tmp_path_factory.mktemp("two_sources") / "test.parquet"
    rows = pq.read_table(task / "data" / "test.parquet").to_pylist()
    pq.write_table(pa.Table.from_pylist([*rows, *({**row, "data_source": "school/sums"} for row in rows)]), data)

    def run(model, reward, step):
        run = start(
            *("--config-name", "quickstart_evaluate", f"actor_rollout_ref.model.path={model}"),
            *(f"data.val_files={data}", f"data.val_batch_size={ROWS // N}", "trainer.experiment_name=evaluation"),
            *(f"reward.custom_reward_function.path={DEADLY}", f"reward.custom_reward_function.name={reward}"),
            *("best_answers.file=best.parquet", "best_answers.keep=2"),
            "reward.num_workers=0",
            job="evaluate",
        )
        assert run.wait() == 0, run.output
        assert run.remaining() == []
        files = RunFiles(run.folder, "evaluation")
        metrics = json.loads((files.newest / "metrics.json").read_text(encoding="utf-8"))
        return EvaluationRun(run, files, metrics, read_jsonl(files.newest / "answers" / f"{step}.jsonl"))

    return run


@pytest.fixture(scope="module")
def folder_result(evaluate, task):
    return evaluate(task / "model", "vote", 0)


@pytest.fixture(scope="module")
def checkpoint_result(evaluate, task, tmp_path_factory):
    """Evaluation of the latest checkpoint of a run; a replica dies meanwhile."""
    folder = tmp_path_factory.mktemp("trained")
    step = folder / "checkpoints" / f"global_step_{STEP}"
    step.mkdir(parents=True)
    convert(open_source(task / "model"), step / "actor", MEGARL, ConversionOptions())
    (step.parent / "latest_checkpointed_iteration.txt").write_text(f"{STEP}\n", encoding="utf-8")
    return evaluate(folder, "vote_and_kill", STEP)


def test_metrics_agree_with_the_responses(folder_result):
    sources = ["arithmetic", "school/sums"]
    assert len(folder_result.answers) == 160
    for source, answers in zip(sources, (folder_result.answers[:80], folder_result.answers[80:]), strict=True):
        assert all({"input", "output", "gts", "score", "step", "pred"} <= answer.keys() for answer in answers)
        prompts = [answers[at : at + N] for at in range(0, 80, N)]
        assert all(len({answer["input"] for answer in prompt}) == 1 for prompt in prompts)
        expected = {
            "mean@4": fmean(answer["score"] for answer in answers),
            "best@4/mean": fmean(max(answer["score"] for answer in prompt) for prompt in prompts),
            "maj@4/mean": fmean(map(majority, prompts)),
        }
        assert len(set(expected.values())) == 3
        for name, value in expected.items():
            assert folder_result.metrics[f"val-core/{source}/reward/{name}"] == pytest.approx(value, rel=1e-6)
        assert folder_result.metrics[f"val-aux/{source}/num_prompts"] == 20
    # Equal prompts get independent responses.
    first, second = ([answer["output"] for answer in folder_result.answers[at : at + 80]] for at in (0, 80))
    assert first != second
    assert len(folder_result.metrics) == len([name for name in folder_result.metrics if name.startswith("val-")])


def majority(prompt):
    """Mean score of the majority by verl's rule, over all orders of the responses."""

    def winning_score(answers):
        ((winner, _),) = Counter(answer["pred"] for answer in answers).most_common(1)
        return next(answer["score"] for answer in answers if answer["pred"] == winner)

    return fmean(map(winning_score, permutations(prompt)))


def test_checkpoint_and_folder_give_equal_responses_even_if_a_replica_dies(folder_result, checkpoint_result):
    output, (converted,) = checkpoint_result.run.output, (checkpoint_result.files.root / "converted").iterdir()
    assert "rollout replica 1 is lost" in output
    assert f"global_step_{STEP}/actor was converted to {converted}" in output
    assert {answer["step"] for answer in checkpoint_result.answers} == {STEP}
    folder_outputs, checkpoint_outputs = (
        [answer["output"] for answer in result.answers] for result in (folder_result, checkpoint_result)
    )
    assert folder_outputs == checkpoint_outputs
    differing = {
        name for name in folder_result.metrics if folder_result.metrics[name] != checkpoint_result.metrics[name]
    }
    assert differing == {"val-aux/rollout/replicas_lost"}
    assert checkpoint_result.metrics["val-aux/rollout/replicas_lost"] == 1


def test_console_table_report_and_summary(folder_result):
    lines = [line.split() for line in folder_result.run.output.splitlines()]
    assert ["data", "source", "variable", "prompts", "mean@4", "best@4", "maj@4", "length", "failed"] in lines
    (row,) = [line for line in lines if line[:1] == ["school/sums"]]
    core = (
        f"{folder_result.metrics[f'val-core/school/sums/reward/{n}']:.3f}"
        for n in ("mean@4", "best@4/mean", "maj@4/mean")
    )
    assert row[1:6] == ["reward", "20", *core] and row[-1] == "0"
    assert "4 answers per prompt, temperature 1" in folder_result.run.output
    assert (folder_result.files.newest / "report.html").stat().st_size > 0
    means = [folder_result.metrics[f"val-core/{source}/reward/mean@4"] for source in ("arithmetic", "school/sums")]
    assert folder_result.files.summary["val_accuracy_after"] == pytest.approx(fmean(means))


def test_best_answers_are_training_data(folder_result):
    rows = pq.read_table(folder_result.run.folder / "best.parquet").to_pylist()
    assert rows and max(Counter(row["prompt"][-1]["content"] for row in rows).values()) <= 4  # from two data sources
    responses = {(answer["output"], answer["score"]) for answer in folder_result.answers}
    assert {("".join(piece["content"] for piece in row["response"]), row["score"]) for row in rows} <= responses
