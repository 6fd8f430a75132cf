"""A complete GRPO job under Ray: seconds per step beside the plain-object step and TRL of ``grpo_step.py``.

    python benchmarks/grpo_job.py --peer-python /path/to/trl-venv/bin/python --steps 4

The job is ``megarl train``: a driver, two actor processes (data parallel 2), two rollout replicas, reward
processes and the weight sync, on two CPU devices. Model, prompts, response lengths, batch and optimizer step are those
of ``grpo_step.py --lengths equal``. An agent loop of this file ignores the end-of-sequence token; otherwise the job is
a user's job. It recomputes old log-probs as jobs do by default; ``--engine-log-probs`` takes them from the engine.

The contestants run one after the other, each alone on the machine: the job, megarl's workers as plain objects, and TRL
in two processes if ``--peer-python`` is given. The table has medians over the steps after the first, which also
allocates memory. Metrics and logs, which the job's driver writes between steps, do not count. The ratio is the speed
relative to TRL, or to the plain objects without TRL. Run it on an idle machine. ``--tiny`` checks the script: it runs
two steps of four prompts, and its numbers say nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import grpo_step
from grpo_workload import LEARNING_RATE, PROMPT_TOKENS, SAMPLES, Mix, mix_of, prompt_ids, score
from machine import benchmark_parser, parse_sizes, processor

from megarl.agents.loop import SingleTurnLoop
from megarl.agents.types import Conversation, Generate, Trajectory
from megarl.tracking import read_metrics

PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights")


class FixedLengthLoop(SingleTurnLoop):
    """Generates responses of ``data.max_response_length`` tokens: the end-of-sequence token does not end them."""

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Generate one turn."""
        return await super().run(replace(conversation, params=replace(conversation.params, ignore_eos=True)), generate)


class Row(NamedTuple):
    """Median seconds of a contestant's steps."""

    name: str
    step: float
    phases: dict[str, float]


def write_prompts(path: Path, steps: int, prompts: int) -> None:
    """Write the prompts of all steps, in order, as verl's RLHF parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [" ".join(f"w{i}" for i in ids) for step in range(steps) for ids in prompt_ids(step, prompts)]
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": text}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for text in texts
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def overrides(folder: Path, mix: Mix, steps: int, engine_log_probs: bool) -> list[str]:
    """Return the configuration of the job: the settings of ``grpo_step.py`` in a job's keys."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"data.train_files={folder}/train.parquet",
        "data.val_files=[]",
        "data.shuffle=false",
        f"data.train_batch_size={mix.prompts}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={mix.longest}",
        f"actor_rollout_ref.model.path={folder}/model",
        f"actor_rollout_ref.model.tokenizer_path={folder}/tokenizer",
        f"{actor}.ppo_mini_batch_size={mix.prompts}",
        f"{actor}.max_token_len_per_gpu=2048",
        f"{actor}.use_kl_loss=false",
        f"{actor}.optim.lr={LEARNING_RATE}",
        f"{actor}.megatron.data_parallel_size=2",
        f"{actor}.megatron.dtype=float32",
        f"{rollout}.n={SAMPLES}",
        f"{rollout}.dtype=float32",
        f"{rollout}.agent.default_agent_loop={Path(__file__).resolve()}:{FixedLengthLoop.__name__}",
        f"algorithm.rollout_correction.bypass_mode={str(engine_log_probs).lower()}",
        f"reward.custom_reward_function.path={Path(__file__).with_name('grpo_workload.py').resolve()}",
        f"reward.custom_reward_function.name={score.__name__}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.hf_export_dir=null",
        "trainer.logger=[jsonl]",
        f"hydra.run.dir={folder}/run",
    ]


def run_job(folder: Path, mix: Mix, steps: int, engine_log_probs: bool) -> Row:
    """Run the job, and return the medians of its steps after the first."""
    write_prompts(folder / "train.parquet", steps, mix.prompts)
    # Beside a config.json of Qwen2, AutoTokenizer would build a byte-level tokenizer from the word-level files.
    (folder / "tokenizer").mkdir()
    for file in (folder / "model").glob("tokenizer*"):
        shutil.copy(file, folder / "tokenizer")
    shutil.copy(folder / "model" / "chat_template.jinja", folder / "tokenizer")
    command = [sys.executable, "-m", "megarl", "train", "--config-name", "grpo"]
    environment = grpo_step.environment(1)
    paths = [str(Path(__file__).parent), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)  # the job imports this file
    done = subprocess.run(
        [*command, *overrides(folder, mix, steps, engine_log_probs)],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"the job failed:\n{done.stdout}\n{done.stderr}")
    rows = [row for row in read_metrics(folder / "run" / "metrics.jsonl") if "timing_s/step" in row]
    assert len(rows) == steps, f"{len(rows)} steps instead of {steps}"
    for row in rows:
        assert row["response_length/min"] == row["response_length/max"] == mix.longest
        assert row["prompt_length/mean"] == PROMPT_TOKENS and not row["actor/skipped_steps"]
    phases = {
        phase: statistics.median(row[f"timing_s/{phase}"] for row in rows[1:])
        for phase in PHASES
        if f"timing_s/{phase}" in rows[-1]
    }
    seconds = statistics.median(row["timing_s/step"] for row in rows[1:])
    return Row("megarl, job under Ray", seconds, phases)


def run_alone(name: str, contestant: grpo_step.Megarl | grpo_step.Peer, steps: int) -> Row:
    """Return the medians of a contestant of ``grpo_step.py``, after its first step."""
    try:
        taken = [contestant.step(number) for number in range(steps)][1:]
    finally:
        contestant.close()
    phases = {"gen": [t.generate for t in taken], "update_actor": [t.update for t in taken]}
    medians = {phase: statistics.median(seconds) for phase, seconds in phases.items()}
    return Row(name, statistics.median(t.step for t in taken), medians)


def peers(args: argparse.Namespace, folder: Path, mix: Mix) -> list[Row]:
    """Measure the plain objects, and TRL where an interpreter is given."""
    plain = grpo_step.Megarl(folder / "model", mix, recompute=not args.engine_log_probs)
    rows = [run_alone("megarl, plain objects", plain, args.steps)]
    if args.peer_python:
        rows.append(run_alone("TRL, 2 processes", grpo_step.Peer(args, folder / "model", mix, 2), args.steps))
    return rows


def print_table(mix: Mix, rows: Sequence[Row]) -> None:
    """Print seconds, rates, ratios and phases."""
    print(f"\n{'median of a step':<26}{'s/step':>9}{'samples/s':>11}{'tokens/s':>10}{'ratio':>8}")
    for row in rows:
        rate = mix.rows / row.step
        ratio = f"{rows[-1].step / row.step:>8.2f}" if len(rows) > 1 else ""
        print(f"{row.name:<26}{row.step:>9.2f}{rate:>11.2f}{rate * mix.longest:>10,.0f}{ratio}")
    print("\nmedian seconds by phase; in the rows without a job, update_actor includes old log-probs")
    for row in rows:
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in row.phases.items())
        print(f"{row.name:<26}{parts}, rest {row.step - sum(row.phases.values()):.2f}")


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--peer-python", help="interpreter with TRL; see grpo_step.py")
    parser.add_argument("--peer-batch-size", type=int, default=64, help="rows of TRL's micro-batch, over its processes")
    parser.add_argument("--engine-log-probs", action="store_true", help="take old log-probs from the engine")
    parser.add_argument("--steps", type=int, default=6, help="number of steps; the first does not count")
    parser.add_argument("--job-only", action="store_true", help="without the plain objects and TRL")
    args = parse_sizes(parser, steps=2, job_only=True)
    if args.steps < 2:
        parser.error("--steps: at least 2; the first does not count")
    mix = mix_of("equal", args.tiny)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = grpo_step.build_model(folder / "model")
        versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "ray", "megatron-core"))
        print(f"{processor()}, load {os.getloadavg()[0]:.1f} at start; {versions}")
        source = "from the engine" if args.engine_log_probs else "recomputed"
        print(f"Qwen2, {parameters / 1e6:.1f} M parameters, float32; {mix.prompts} prompts x {SAMPLES} responses of "
              f"{mix.longest} tokens; old log-probs {source}", flush=True)  # fmt: skip
        rows = [run_job(folder, mix, args.steps, args.engine_log_probs)]
        if not args.job_only:
            rows += peers(args, folder, mix)
    print_table(mix, rows)


if __name__ == "__main__":
    main()
