"""One evaluation, from its configuration to its metrics: validation of a policy that does not change."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path

from megarl.config.evaluate_schema import EvaluateConfig
from megarl.rollout.endpoint import build_endpoint
from megarl.tracing import PHASE, span
from megarl.tracking import Console, check_trackers, validation_table
from megarl.trainer.best_answers import BestAnswers
from megarl.trainer.evaluated_model import find_model
from megarl.trainer.frozen_policy import CONVERTED, STREAM, FrozenReplicas, describe, frozen_rollout, policy_tokenizer
from megarl.trainer.metrics import Metrics
from megarl.trainer.preflight import check_answers
from megarl.trainer.prompts import validation_loader
from megarl.trainer.reporting import RunReporter
from megarl.trainer.reward_model import SequenceReader, reward_model_scorer, started_reward_model
from megarl.trainer.reward_phase import RewardPhase, reward_manager
from megarl.trainer.samples import Sample, dump_samples, evenly
from megarl.trainer.session import placed_devices, run_logs
from megarl.trainer.tracing import RunTracing
from megarl.trainer.validation import Validator

METRICS_FILE = "metrics.json"
ANSWERS = "answers"
SAMPLES_IN_REPORT = 256


def run(config: EvaluateConfig, output_dir: Path) -> Metrics:
    """Evaluate as the configuration says.

    Args:
        config: complete, as ``megarl.config.build`` returns it; its model path becomes that of a Hugging Face folder.
        output_dir: folder of the run's files, which exists. A converted checkpoint goes beside it.

    Returns:
        What ``metrics.json`` holds.

    Raises:
        MegarlError: something is wrong with configuration, data, model, resources or a worker; processes are gone.
    """
    check_trackers(config.trainer.logger)
    model = find_model(config.actor_rollout_ref.model.path)
    check_answers(config, model.config)
    tokenizer = policy_tokenizer(config, model)
    loader = validation_loader(config, tokenizer)
    logs = run_logs(config.trainer, output_dir)
    rewards = RewardPhase(reward_manager(config, tokenizer, logs), tokenizer, config.reward_model)
    reader = SequenceReader(config.reward_model, tokenizer) if config.reward_model.enable else None
    with Console(quiet=config.trainer.quiet, title=config.trainer.experiment_name) as console:
        console.message(describe(config, model))
        with console.phase("model"):
            folder = model.as_hugging_face(output_dir.parent / CONVERTED, console.message)
        config.actor_rollout_ref.model.path = str(folder)
        # The table tells more than the console's tracker would.
        trackers = [name for name in config.trainer.logger if name != "console"]
        run = dataclasses.replace(config.trainer, logger=trackers)
        reporter = RunReporter(run, dataclasses.asdict(config), output_dir, console)
        with (
            rewards,
            build_endpoint(config, tokenizer) or nullcontext() as endpoint,
            placed_devices(config.trainer, logs) as pool,
            RunTracing(config.trainer, output_dir, console.warn, pool) as reporter.tracing,
        ):
            with console.phase("start workers", announce=True), span("start_workers", PHASE):
                replicas = FrozenReplicas(config, pool)
                if reader:
                    rewards.model = reward_model_scorer(started_reward_model(config, pool), reader)
            reporter.begin_step(0)
            with reporter.phase("testing"):
                rollout = frozen_rollout(config, replicas, tokenizer, endpoint)
                best = BestAnswers(config.best_answers, tokenizer, config.data.max_response_length)
                validator = Validator(rollout, rewards, loader, tokenizer)
                metrics, samples = validator.run(model.step, STREAM, best.add)
        _record(config, model.step, metrics, samples, reporter)
        if config.best_answers.file:
            console.message(best.write())
        return metrics


def _record(config: EvaluateConfig, step: int, metrics: Metrics, samples: list[Sample], reporter: RunReporter) -> None:
    """Writes answers, metrics and report, and shows the table."""
    trainer = config.trainer
    answers = Path(trainer.validation_data_dir or reporter.folder / ANSWERS)
    dump_samples(answers, step, samples)
    (reporter.folder / METRICS_FILE).write_text(json.dumps(metrics, indent=2) + "\n")
    reporter.keep_samples(step, evenly(samples, SAMPLES_IN_REPORT), "validation")
    reporter.log_samples(step, evenly(samples, trainer.log_val_generations))
    reporter.log_validation(step, metrics)
    reporter.console.show(validation_table(metrics, config.actor_rollout_ref.rollout.val_kwargs.n))
    reporter.console.message(f"answers: {answers / f'{step}.jsonl'}")
    reporter.close(
        {
            "val_accuracy_after": reporter.accuracy,
            "wall_seconds": reporter.wall_seconds,
            "hf_dir": config.actor_rollout_ref.model.path,
        }
    )
