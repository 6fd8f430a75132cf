"""Files of a run's folder: metrics, configuration, environment, status. The run may be in progress or killed."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.base.json_text import parse_json
from megarl.config.keys import leaves, lookup
from megarl.config.schema.jobs import POOL_OWNERS
from megarl.tracking.jsonl_files import BALANCE_FILE, METRICS_FILE, BalanceRows, MetricsRow, read_balance, read_metrics

CONFIG_FILE, FACTS_FILE, SUMMARY_FILE, SAMPLES_FOLDER = "config.yaml", "run.json", "summary.json", "samples"
SILENT_SECONDS = 600.0  # a run without a summary counts as ended after this time, and ten steps, without a metrics row
_DEEPEST = 4


class NoRunError(ValueError):
    """A folder contains no run."""


@dataclass(frozen=True)
class RunRecord:
    """Content of a run's folder."""

    folder: Path
    name: str  # name of the experiment
    rows: list[MetricsRow]
    config: Mapping[str, Any] = field(default_factory=dict)  # nested plain values; empty without config.yaml
    facts: Mapping[str, Any] = field(default_factory=dict)  # run.json: command, software, machine, changed keys
    summary: Mapping[str, Any] = field(default_factory=dict)  # summary.json, as `RunSummary` writes it; or empty
    status: str = "finished"  # finished, running or ended early
    problems: tuple[str, ...] = ()  # errors of unreadable files
    balance: BalanceRows = field(default_factory=dict)  # load of each data-parallel rank

    @property
    def train_samples(self) -> Path:
        """Folder of the kept training samples; it may be missing."""
        return self.folder / SAMPLES_FOLDER / "train"

    @property
    def validation_samples(self) -> Path:
        """Folder of the kept validation samples; it may be missing."""
        return self.folder / SAMPLES_FOLDER / "validation"

    def setting(self, key: str) -> Any:
        """Return the value of a dotted configuration key; None if it is missing."""
        return lookup(self.config, key)


def find_runs(paths: list[Path]) -> list[Path]:
    """Find the folders of runs in and below the given folders, in order; a sweep's folder yields all its runs.

    Raises:
        NoRunError: a path is not a folder, or contains no run.
    """
    runs: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise NoRunError(f"{path}: no such folder")
        below = list(_runs_below(path, _DEEPEST))
        if not below:
            raise NoRunError(f"{path}: no run in it or below it (a run's folder holds {METRICS_FILE})")
        runs.update(dict.fromkeys(run.resolve() for run in below))
    return list(runs)


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    """Find runs, which do not nest; a checkpoint with a copy of the metrics is not a run."""
    if (path / METRICS_FILE).is_file():
        if (path / "trainer_state.json").is_file():
            return  # a checkpoint
        yield path
    elif depth:
        folders = (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        # The runs of a sweep are numbered.
        by_number = sorted(folders, key=lambda at: (int(at.name), "") if at.name.isdigit() else (-1, at.name))
        for entry in by_number:
            yield from _runs_below(entry, depth - 1)


def read_run(folder: Path, now: float | None = None) -> RunRecord:
    """Read a run's folder. Parts of missing or broken files are empty; broken files are listed in ``problems``."""
    problems: list[str] = []
    config = _read(folder / CONFIG_FILE, problems)
    facts, summary = (_read(folder / name, problems) for name in (FACTS_FILE, SUMMARY_FILE))
    try:
        rows = read_metrics(folder / METRICS_FILE)
    except ValueError as error:
        rows = []
        problems.append(str(error))
    try:
        balance = read_balance(folder / BALANCE_FILE)
    except ValueError as error:
        balance = {}
        problems.append(str(error))
    trainer = config.get("trainer")
    name = trainer.get("experiment_name") if isinstance(trainer, Mapping) else None
    if summary:
        status = "ended early" if summary.get("stopped") else "finished"
    else:
        status = _status(folder / METRICS_FILE, rows, time.time() if now is None else now)
    return RunRecord(folder, str(name or folder.name), rows, config, facts, summary, status, tuple(problems), balance)


def _read(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        if path.suffix == ".json":
            value = parse_json(path.read_text(encoding="utf-8"))
        else:
            value = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a mapping")
        return {}
    return value


def _status(metrics: Path, rows: list[MetricsRow], now: float) -> str:
    seconds = [row["timing_s/step"] for row in rows[-10:] if "timing_s/step" in row]
    timeout = max(SILENT_SECONDS, sum(seconds))
    changed = metrics.stat().st_mtime if metrics.exists() else 0.0
    return "running" if now - changed < timeout else "ended early"


def cli_text(value: Any) -> str:
    """Format a configuration value as on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def config_rows(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return a row per configuration key of any run.

    Returns:
        ``key``; ``values`` by run (None = the run lacks the key); if known, the schema's ``default`` and the
        ``origins`` of the values (:class:`megarl.config.build.ChangedKey`).
    """
    flat = [{key: cli_text(value) for key, value in leaves(run.config)} for run in runs]
    changed = [{change["key"]: change for change in run.facts.get("differences", ())} for run in runs]
    rows = []
    for key in dict.fromkeys(name for values in flat for name in values):
        changes = [by_key.get(key) for by_key in changed]
        default = next((cli_text(change["default"]) for change in changes if change), None)
        rows.append(
            {
                "key": key,
                "values": [values.get(key) for values in flat],
                "default": default,
                "origins": [change["origin"] if change else "" for change in changes],
            }
        )
    return rows


def environment_rows(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return a row (``key``, ``values`` by run) for command, start, source, versions and machine."""
    environments = [dict(_environment(run)) for run in runs]
    names = dict.fromkeys(name for facts in environments for name in facts)
    return [{"key": name, "values": [facts.get(name) for facts in environments]} for name in names]


def _environment(run: RunRecord) -> list[tuple[str, str]]:
    facts = run.facts
    if not facts:
        return [("folder", str(run.folder))]
    rows = [("command", rerun_command(facts))] if "config_name" in facts else []
    rows += [("started", str(facts["started"]))] if "started" in facts else []
    rows.append(("folder", str(run.folder)))
    for name, state in facts.get("git", {}).items():
        changed = state.get("changed", [])
        dirty = f", with {len(changed)} changed files: {', '.join(changed[:8])}" if changed else ""
        branch = f" ({state['branch']})" if state.get("branch") else ""
        rows.append((f"source of {name}" if name == "megarl" else name, f"{state.get('commit', '')}{branch}{dirty}"))
    return rows + [
        (name, str(value)) for kind in ("versions", "machine") for name, value in facts.get(kind, {}).items()
    ]


def rerun_command(facts: Mapping[str, Any]) -> str:
    """Return the command that starts the same run again."""
    overrides = shlex.join(map(str, facts.get("overrides", ())))
    return f"megarl {facts.get('job', 'train')} --config-name {facts['config_name']} {overrides}".strip()


def run_description(run: RunRecord) -> list[tuple[str, str]]:
    """Describe a run by label and text: algorithm, model, data, layout, engine."""
    get = run.setting
    rollout = "actor_rollout_ref.rollout"
    lines: list[tuple[str, str]] = []

    def add(label: str, *parts: str | None) -> None:
        text = ", ".join(part for part in parts if part)
        if text:
            lines.append((label, text))

    estimator = get("algorithm.adv_estimator")
    loss = get("actor_rollout_ref.actor.policy_loss.loss_mode")
    add("Algorithm", estimator and f"{estimator} advantages", loss and f"{loss} policy loss", _kl(run))
    add("Model", _text(get("actor_rollout_ref.model.path") or get("model.path")))
    add("Data", _text(get("data.train_files")))
    prompts, answers = get("data.train_batch_size"), get(f"{rollout}.n")
    per_step = f"{prompts} prompts" if estimator else f"{prompts} rows" if prompts else None
    mini_batch = get("actor_rollout_ref.actor.ppo_mini_batch_size")
    of_update = mini_batch and f"mini-batches of {mini_batch} prompts"
    add("Each step", per_step, answers and f"{answers} answers each", of_update)
    add("Actor", _layout(get("actor_rollout_ref.actor.megatron") or get("megatron")))
    add("Critic", _layout(get("critic.megatron")) if estimator == "gae" else None)
    tp = get(f"{rollout}.tensor_model_parallel_size")
    add("Rollout", get(f"{rollout}.name") and f"{get(f'{rollout}.name')} engine", tp and f"TP {tp}")
    nodes, devices = get("trainer.nnodes"), get("trainer.n_gpus_per_node")
    own = [
        f"{count} x {get(f'{section}.n_gpus_per_node') or devices} for {owner} alone"
        for section, owner in POOL_OWNERS.items()
        if (count := get(f"{section}.nnodes"))
    ]
    add("Devices", devices and f"{nodes or 1} x {devices} {get('trainer.device') or ''}".strip(), *own)
    return lines


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return None if value is None else str(value) if not isinstance(value, Mapping) else json.dumps(value)


def _kl(run: RunRecord) -> str | None:
    if run.setting("algorithm.use_kl_in_reward"):
        return f"KL in the reward ({run.setting('algorithm.kl_ctrl.kl_coef')})"
    if run.setting("actor_rollout_ref.actor.use_kl_loss"):
        return f"KL in the loss ({run.setting('actor_rollout_ref.actor.kl_loss_coef')})"
    return None


def _layout(megatron: Any) -> str | None:
    if not isinstance(megatron, Mapping):
        return None
    sizes = (
        ("TP", "tensor_model_parallel_size"), ("PP", "pipeline_model_parallel_size"),
        ("CP", "context_parallel_size"), ("EP", "expert_model_parallel_size"), ("DP", "data_parallel_size"),
    )  # fmt: skip
    parts = [f"{name} {size}" for name, key in sizes if (size := megatron.get(key)) not in (None, 1)]
    return " x ".join(parts) or "one rank" if megatron else None
