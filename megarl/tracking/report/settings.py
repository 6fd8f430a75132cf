"""What runs were made with: configuration with its differences from the defaults, software, machine, command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.tracking.report.run_files import RunRecord


def shown(value: Any) -> str:
    """A configuration value as it stands on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted key and value of every leaf of a nested config, as they stand on the command line."""
    leaves: list[tuple[str, str]] = []
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves += flatten(value, f"{name}.")
        else:
            leaves.append((name, shown(value)))
    return leaves


def config_rows(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Every key that a run has: ``key``, ``values`` by run (None = it lacks the key), and where known the schema's
    ``default`` and the ``origins`` of the runs' values (:class:`megarl.config.differences.Difference`)."""
    flat = [dict(flatten(run.config)) for run in runs]
    told = [{d["key"]: d for d in run.facts.get("differences", ())} for run in runs]
    rows = []
    for key in dict.fromkeys(name for leaves in flat for name in leaves):
        found = [differences.get(key) for differences in told]
        default = next((shown(d["default"]) for d in found if d), None)
        rows.append(
            {
                "key": key,
                "values": [leaves.get(key) for leaves in flat],
                "default": default,
                "origins": [d["origin"] if d else "" for d in found],
            }
        )
    return rows


def environment_rows(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Command, times, source, versions and machine of each run: ``key`` and ``values``; empty where none tells."""
    told = [dict(_environment(run)) for run in runs]
    names = dict.fromkeys(name for facts in told for name in facts)
    return [{"key": name, "values": [facts.get(name) for facts in told]} for name in names]


def _environment(run: RunRecord) -> list[tuple[str, str]]:
    facts = run.facts
    if not facts:
        return [("folder", str(run.folder))]
    rows = [("command", command(facts))] if "config_name" in facts else []
    rows += [("started", str(facts["started"]))] if "started" in facts else []
    rows.append(("folder", str(run.folder)))
    for name, state in facts.get("git", {}).items():
        changed = state.get("changed", [])
        dirty = f", with {len(changed)} changed files: {', '.join(changed[:8])}" if changed else ""
        branch = f" ({state['branch']})" if state.get("branch") else ""
        rows.append((f"source of {name}" if name == "megarl" else name, f"{state.get('commit', '')}{branch}{dirty}"))
    rows += [(f"{name}", str(version)) for name, version in facts.get("versions", {}).items()]
    rows += [(name, str(value)) for name, value in facts.get("machine", {}).items()]
    return rows


def command(facts: Mapping[str, Any]) -> str:
    """The command that starts the same run again."""
    overrides = " ".join(_quoted(str(text)) for text in facts.get("overrides", ()))
    return f"megarl {facts.get('job', 'train')} --config-name {facts['config_name']} {overrides}".strip()


def _quoted(text: str) -> str:
    plain = all(letter.isalnum() or letter in "._=/-+:,@%" for letter in text)
    return text if plain else "'" + text.replace("'", "'\\''") + "'"


def purpose(run: RunRecord) -> list[tuple[str, str]]:
    """What the run is, in a few words each: algorithm, model, data, layout, engine."""
    get = run.setting
    rollout = "actor_rollout_ref.rollout"
    told: list[tuple[str, str]] = []

    def add(label: str, *parts: str | None) -> None:
        """One line, of the parts that there are."""
        text = ", ".join(part for part in parts if part)
        if text:
            told.append((label, text))

    estimator = get("algorithm.adv_estimator")
    loss = get("actor_rollout_ref.actor.policy_loss.loss_mode")
    add("Algorithm", estimator and f"{estimator} advantages", loss and f"{loss} policy loss", _kl(run))
    add("Model", _text(get("actor_rollout_ref.model.path") or get("model.path")))
    add("Data", _text(get("data.train_files")))
    prompts, answers = get("data.train_batch_size"), get(f"{rollout}.n")
    per_step = f"{prompts} prompts" if estimator else f"{prompts} rows" if prompts else None
    add("Each step", per_step, answers and f"{answers} answers each", _mini_batch(run))
    add("Actor", _layout(get("actor_rollout_ref.actor.megatron") or get("megatron")))
    add("Critic", _layout(get("critic.megatron")) if estimator == "gae" else None)
    tp = get(f"{rollout}.tensor_model_parallel_size")
    add("Rollout", get(f"{rollout}.name") and f"{get(f'{rollout}.name')} engine", tp and f"TP {tp}")
    nodes, devices = get("trainer.nnodes"), get("trainer.n_gpus_per_node")
    add("Devices", devices and f"{nodes or 1} x {devices} {get('trainer.device') or ''}".strip())
    return told


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


def _mini_batch(run: RunRecord) -> str | None:
    size = run.setting("actor_rollout_ref.actor.ppo_mini_batch_size")
    return f"mini-batches of {size} prompts" if size else None


def _layout(megatron: Any) -> str | None:
    if not isinstance(megatron, Mapping):
        return None
    sizes = (
        ("TP", "tensor_model_parallel_size"), ("PP", "pipeline_model_parallel_size"),
        ("CP", "context_parallel_size"), ("EP", "expert_model_parallel_size"), ("DP", "data_parallel_size"),
    )  # fmt: skip
    parts = [f"{name} {size}" for name, key in sizes if (size := megatron.get(key)) not in (None, 1)]
    return " x ".join(parts) or "one rank" if megatron else None
