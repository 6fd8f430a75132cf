"""One evaluation, from its configuration to its metrics: validation of a policy that does not change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megarl.cluster import PlacedPool
from megarl.config.evaluate_schema import EvaluateConfig
from megarl.tracking import Console, check_trackers, validation_table
from megarl.trainer.best_answers import BestAnswers
from megarl.trainer.frozen_policy import STREAM, FrozenPolicy
from megarl.trainer.metrics import Metrics
from megarl.trainer.preflight import check_answers
from megarl.trainer.prompts import validation_loader
from megarl.trainer.reporting import RunReporter
from megarl.trainer.reward_model import SequenceReader, reward_model_scorer, started_reward_model
from megarl.trainer.reward_phase import RewardPhase, reward_manager
from megarl.trainer.samples import Sample, dump_samples, evenly
from megarl.trainer.session import run_logs
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
    policy = FrozenPolicy(config, output_dir)
    check_answers(config, policy.model.config)
    tokenizer, step = policy.tokenizer, policy.model.step
    loader = validation_loader(config, tokenizer)
    manager = reward_manager(config, tokenizer, run_logs(config.trainer, output_dir))
    rewards = RewardPhase(manager, tokenizer, config.reward_model)
    reader = SequenceReader(config.reward_model, tokenizer) if config.reward_model.enable else None

    def start_reward_model(pool: PlacedPool) -> None:
        if reader:
            rewards.model = reward_model_scorer(started_reward_model(config, pool), reader)

    with Console(quiet=config.trainer.quiet, title=config.trainer.experiment_name) as console:
        policy.convert(console)
        # The table tells more than the console's tracker would.
        trackers = [name for name in config.trainer.logger if name != "console"]
        run = dataclasses.replace(config.trainer, logger=trackers)
        reporter = RunReporter(run, dataclasses.asdict(config), output_dir, console)
        with rewards, policy.served(console, start_reward_model) as rollout, reporter.phase("testing"):
            best = BestAnswers(config.best_answers, tokenizer, config.data.max_response_length)
            metrics, samples = Validator(rollout, rewards, loader, tokenizer).run(step, STREAM, best.add)
        _record(config, step, metrics, samples, reporter)
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
