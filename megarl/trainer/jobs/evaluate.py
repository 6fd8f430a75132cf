"""Evaluation job: generate, score and report metrics of a policy with fixed weights, on held-out prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from megarl.agents.endpoint import check_endpoint
from megarl.algorithms.selection import best_of_groups
from megarl.base.atomic_write import atomic_write
from megarl.base.errors import DataError
from megarl.base.image_tokens import Image
from megarl.base.json_text import format_json
from megarl.base.reductions import Metrics
from megarl.base.run_writer import RUN_WRITER
from megarl.cluster.agent_runners import AgentRunners
from megarl.config.schema.jobs import REWARD_MODEL, BestAnswersConfig, EvaluateConfig
from megarl.config.stored import stored_config
from megarl.data import DataProto
from megarl.data.images import IMAGES, stored_images, stored_message
from megarl.rewards.scorer import decode_text
from megarl.samples.reward_functions import runner_scorers
from megarl.samples.reward_phase import RewardModelScorer, RewardPhase, SequenceReader, reward_manager
from megarl.tracking import validation_table
from megarl.trainer.jobs.early_checks import check_same_images
from megarl.trainer.jobs.frozen_policy import STREAM, FrozenPolicy, FrozenReplicas
from megarl.trainer.jobs.output_folders import check_output_files
from megarl.trainer.jobs.preflight import check_answers, check_towers
from megarl.trainer.jobs.session import open_job
from megarl.trainer.phases.data_loading import validation_loader
from megarl.trainer.phases.end_tokens import policy_end_tokens
from megarl.trainer.phases.prompt_images import longest_with_images
from megarl.trainer.phases.validation import Validator
from megarl.trainer.records.reporting import RunReporter
from megarl.trainer.records.sample_records import LATER_IMAGES, Sample, dump_samples, evenly_spaced, images_by_turn
from megarl.trainer.roles.worker_groups import ready_reward_model
from megarl.workers.row_math import counted_rows, generated_tokens, row_sums, truncated_rows

METRICS_FILE = "metrics.json"
ANSWERS = "answers"
SAMPLES_IN_REPORT = 256
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
FILES = pa.list_(pa.struct([("bytes", pa.binary())]))
COLUMNS = pa.schema(
    [("prompt", MESSAGES), ("response", MESSAGES), ("data_source", pa.string()), ("score", pa.float64())]
)
ASSISTANT, ENVIRONMENT = "assistant", "tool"


def run(config: EvaluateConfig, output_dir: Path) -> Metrics:
    """Evaluate a policy.

    Returns:
        The metrics, as in ``metrics.json``.

    Raises:
        MegarlError: an error in configuration, data, model, resources or a worker; all processes are ended.
    """
    policy = FrozenPolicy(config, output_dir)
    check_towers(config)
    check_answers(config, policy.model.config)
    tokenizer, step = policy.tokenizer, policy.model.step
    check_output_files(config, step)
    loader = validation_loader(policy.with_model_folder, tokenizer)
    scores, longest = config.reward.model, longest_with_images(policy.with_model_folder)
    if scores.enable:
        check_same_images(policy.with_model_folder.actor_rollout_ref.model.path, str(scores.path), "reward.model.path")
    reader = SequenceReader(scores, tokenizer, longest) if scores.enable else None
    config = policy.config
    with open_job(config, output_dir) as session:
        functions = reward_manager(config, tokenizer, session.logs)
        policy.convert(session.console)
        end_tokens = policy_end_tokens(config.actor_rollout_ref.model.path, tokenizer, session.console.warn)
        # The table below replaces the console's tracker.
        trackers = [name for name in config.trainer.logger if name != "console"]
        logged = dataclasses.replace(config.trainer, logger=trackers)
        reporter = RunReporter(logged, stored_config(config), output_dir, session.console, started=session.started)
        check_endpoint(config)
        pool = session.start(functions)
        with session.starting_workers() as progress:
            scorers = runner_scorers(config, session.logs, config.trainer.nnodes)
            runners = session.enter(AgentRunners(config, tokenizer, pool, scorers))
            replicas = FrozenReplicas(config, pool, progress, end_tokens)
            runners.wait_ready()
            scorer = None
            if reader:
                workers = ready_reward_model(config, session.pools.of(REWARD_MODEL), progress)
                scorer = RewardModelScorer(workers, reader)
        session.tracing.begin_step(0)
        best = BestAnswers(config.best_answers, tokenizer)
        with reporter.phase("testing"):
            rollouts = replicas.rollouts(tokenizer, runners)
            rewards = RewardPhase(functions, tokenizer, config.reward, scorer)
            metrics, samples = Validator(rollouts, rewards, loader, tokenizer).run(step, STREAM, best.add)
        _record(config, step, metrics, samples, reporter)
        if config.best_answers.file:
            session.console.message(best.write())
        return metrics


def _record(config: EvaluateConfig, step: int, metrics: Metrics, samples: list[Sample], reporter: RunReporter) -> None:
    """Write samples, metrics and summary, and show the table."""
    trainer = config.trainer
    answers = Path(trainer.validation_data_dir or reporter.folder / ANSWERS)
    dump_samples(answers, step, samples)
    RUN_WRITER.replace(reporter.folder / METRICS_FILE, format_json(metrics, indent=2) + "\n")
    reporter.keep_samples(step, evenly_spaced(samples, SAMPLES_IN_REPORT), "validation")
    reporter.log_samples(step, evenly_spaced(samples, trainer.log_val_generations))
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


class BestAnswers:
    """Collects the best samples of each prompt as SFT data (rejection sampling).

    Only samples that the policy ended itself are kept; a truncated one would teach to end anywhere. A conversation is
    split into turns, and SFT does not train on the turns of tools and searches.
    """

    def __init__(self, config: BestAnswersConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.prompts = 0
        self._rows: list[dict[str, Any]] = []

    def add(self, batch: DataProto) -> None:
        """Add a scored batch of complete groups; ignored without ``best_answers.file``."""
        if self.config.file is None:
            return
        scores = row_sums(batch, "token_level_scores").numpy()
        uids, images = batch.non_tensor_batch["uid"], batch.non_tensor_batch.get(IMAGES)
        usable = (counted_rows(batch) & ~truncated_rows(batch)).numpy()
        self.prompts += len(set(uids.tolist()))
        for row in best_of_groups(scores, uids, usable, self.config.keep):
            if usable[row] and (self.config.min_score is None or scores[row] >= self.config.min_score):
                self._rows.append(
                    {
                        "prompt": [_message(message) for message in batch.non_tensor_batch["raw_prompt"][row]],
                        **({} if images is None else _files(batch[row], images[row])),
                        "response": self._turns(batch, row),
                        "data_source": str(batch.non_tensor_batch["data_source"][row]),
                        "score": float(scores[row]),
                    }
                )

    def write(self) -> str:
        """Write the file atomically; return a line for the user.

        Raises:
            DataError: no sample is good enough.
        """
        path = Path(str(self.config.file))
        if not self._rows:
            raise DataError(
                f"best_answers.file={path}: none of the answers to {self.prompts} prompts was ended by the policy and "
                f"has at least best_answers.min_score={self.config.min_score}; lower it, or sample more answers "
                "(actor_rollout_ref.rollout.val_kwargs.n)",
                code="data.no-best-answer",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as unfinished:
            shown = [name for name in (IMAGES, LATER_IMAGES) if any(row.get(name) for row in self._rows)]
            columns = pa.schema([*COLUMNS, *(pa.field(name, FILES) for name in shown)])
            pq.write_table(pa.Table.from_pylist(self._rows, schema=columns), unfinished)
        return f"best answers: {path}, {len(self._rows)} answers to {self.prompts} prompts"

    def _turns(self, batch: DataProto, row: int) -> list[dict[str, str]]:
        """Split a response into policy turns and environment turns."""
        one = batch[row]
        ids, generated = one.packed("responses").tolist(), generated_tokens(one).tolist()
        length = len(ids)
        borders = [index for index in range(1, length) if generated[index] != generated[index - 1]]
        return [
            {
                "role": ASSISTANT if generated[begin] else ENVIRONMENT,
                "content": decode_text(self.tokenizer, ids[begin:end], skip_special_tokens=end == length),
            }
            for begin, end in zip([0, *borders], [*borders, length], strict=True)
        ]


def _files(row: DataProto, images: Sequence[Image]) -> dict[str, list[dict[str, bytes]]]:
    shown = images_by_turn(row.packed("prompts"), row.packed("responses"), images)
    return {name: stored_images(files) for name, files in shown.items()}


def _message(message: Any) -> dict[str, str]:
    return {"role": str(message["role"]), "content": str(stored_message(message)["content"])}
