"""Disaggregated training from the command line: streaming within the bound, and exact replay after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable

from cli_runs import CliRun, RunFiles, assert_finite, read_jsonl, reproducible
from documented_metrics import undocumented

STEPS, PROMPTS = 4, 24
TIMED = ("rollout_service/",)
"""Metrics of queues, which depend on timing."""


def test_a_resumed_run_repeats_the_batches_of_an_asynchronous_run(
    small: list[str], dense_reward: list[str], start: Callable[..., CliRun]
) -> None:
    arguments = [
        *("--config-name", "quickstart_async", *small, *dense_reward, "trainer.experiment_name=async"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.test_freq=3", "trainer.save_freq=2"),
        "trainer.max_actor_ckpt_to_keep=null",
    ]
    run = start(*arguments)
    assert run.wait() == 0, run.output
    first = RunFiles(run.folder, "async")
    assert list(first.steps) == list(range(1, STEPS + 1))
    assert undocumented(name for row in first.metrics for name in row) == []
    for step, row in first.steps.items():
        assert_finite(row)
        assert row["training/off_policy/trajectory_staleness_worst"] <= 1
        assert row["fully_async/count/current_param_version"] == step
    # One step off: the samples of the second step were generated while the first one trained.
    assert first.steps[2]["training/off_policy/admission_staleness"] > 0
    order = first.newest / "batch_order.jsonl"
    trained = [group for row in read_jsonl(order) for group in row["groups"]]
    assert sorted(trained) == list(range(STEPS * PROMPTS)) and trained != sorted(trained)

    checkpoint = run.folder / "outputs" / "async" / "checkpoints" / "global_step_2"
    ledger = json.loads((checkpoint / "trainer_state.json").read_text())["rollout"]["ledger"]
    assert ledger["trained"] == 2 * PROMPTS and ledger["admitted"] == len(ledger["groups"]) + 2 * PROMPTS == STEPS * 24
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    run = start(*arguments, *resume, f"trainer.replay_order={order}")
    assert run.wait() == 0, run.output
    again = RunFiles(run.folder, "async")
    assert read_jsonl(again.newest / "batch_order.jsonl") == read_jsonl(order)
    for step in (3, 4):
        expected, found = (
            {name: value for name, value in reproducible(row).items() if not name.startswith(TIMED)}
            for row in (first.steps[step], again.steps[step])
        )
        assert found == expected
