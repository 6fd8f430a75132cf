"""``layout=auto``: chooses the layout of a run for the devices found, and explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from megarl.base.checkpoint_files import POINTER
from megarl.base.errors import ConfigError
from megarl.base.formatting import GIB, table_lines
from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.keys import leaves, value_at
from megarl.config.problems import format_value
from megarl.ops.plan.estimate import overrides_of
from megarl.ops.plan.hardware import Hardware, hardware_for
from megarl.ops.plan.layout_choice import (
    AutomaticLayout,
    ChosenKey,
    NothingFitsError,
    choose_layout,
    fits,
    is_layout_key,
)
from megarl.trainer.jobs.hub_files import with_hub_configs

Config = TrainConfig | SupervisedConfig
Build = Callable[[Mapping[str, Any]], Config]  # makes the unchecked configuration of the job with changed values

_DEVICES = "trainer.n_gpus_per_node"


def automatic_layout(build: Build, fixed: frozenset[str], hardware_name: str | None = None) -> AutomaticLayout:
    """Choose the layout of a run.

    Args:
        fixed: keys set by hand, whose values stay.
        hardware_name: hardware file to plan for; None = ``trainer.hardware``, or the devices found.

    Raises:
        ConfigError: nothing fits; the message names the smallest excess and what helps.
        ModelError: a model's ``config.json`` is invalid.
    """
    config = build({})
    hardware = hardware_for(config, hardware_name)
    found: list[ChosenKey] = []
    if _DEVICES not in fixed:
        count, reason = hardware.devices_per_node, f"devices of a node of {hardware.name}"
        found = [ChosenKey(_DEVICES, *((1, "one process on a CPU") if hardware.device == "cpu" else (count, reason)))]
    changes = {chosen.key: chosen.value for chosen in found}
    stored = _stored_layout(build(changes), fixed)
    fixed = fixed | changes.keys() | stored.keys()
    found += [
        ChosenKey(key, value, "as in the checkpoint") for key, value in stored.items() if value_at(config, key) != value
    ]
    changes |= stored

    def config_with(extra: Mapping[str, Any]) -> Config:
        config = build({**changes, **extra})
        return config if hardware.device == "cpu" else with_hub_configs(config)

    try:
        chosen = choose_layout(config_with({}), fixed, hardware)
    except NothingFitsError as error:
        helps = list(_remedies(config_with, fixed, hardware))
        advice = f"It fits with: {'; '.join(helps)}" if helps else "Use more devices, or a smaller model"
        raise ConfigError(f"{error.text}. {advice}", code=error.code) from error
    return chosen._replace(keys=(*found, *chosen.keys))


def _stored_layout(config: Config, fixed: frozenset[str]) -> dict[str, Any]:
    """Return the automatic layout of the checkpoint from which the run continues on the same number of devices."""
    trainer = config.trainer
    folder = Path(str(trainer.resume_from_path))
    if trainer.resume_mode != "resume_path":
        root = Path(str(trainer.default_local_dir))
        step = (root / POINTER).read_text(encoding="ascii").strip() if (root / POINTER).is_file() else ""
        folder = root / f"global_step_{step}"
    file = folder / "config.yaml"
    if trainer.resume_mode == "disable" or not file.is_file():
        return {}
    stored = dict(leaves(yaml.safe_load(file.read_text(encoding="utf-8"))))
    devices = {f"trainer.{key}": getattr(trainer, key) for key in ("nnodes", "n_gpus_per_node")}
    if stored.get("layout") != "auto" or any(stored.get(key) != value for key, value in devices.items()):
        return {}
    own = dict(leaves(asdict(config)))
    return {key: value for key, value in stored.items() if is_layout_key(key) and key in own and key not in fixed}


def _remedies(build: Build, fixed: frozenset[str], hardware: Hardware) -> Iterator[str]:
    """Yield changes of the job with which a layout fits, each confirmed."""
    config = build({})
    nodes, supervised = config.trainer.nnodes, isinstance(config, SupervisedConfig)
    model = "model" if supervised else "actor_rollout_ref.model"
    length = "data.max_length" if supervised else "data.max_response_length"
    tokens = config.data.max_length if isinstance(config, SupervisedConfig) else config.data.max_response_length
    groups = (
        [{"trainer.nnodes": factor * nodes} for factor in (2, 4, 8, 16)],
        [{f"{model}.lora_rank": 32}],
        [{length: tokens // factor} for factor in (2, 4, 8)],
    )
    for group in groups:
        for changes in group:
            if fits(build(changes), fixed, hardware):
                yield " ".join(overrides_of(changes))
                break
    saving = [key for key in fixed if key.endswith(("_offload", ".recompute_granularity"))]
    if saving and fits(config, fixed.difference(saving), hardware):
        yield f"{', '.join(sorted(saving))} left to the planner"


def layout_lines(layout: AutomaticLayout) -> list[str]:
    """Describe a layout: a table of keys, values and reasons, and the memory of a device in each phase."""
    rows = [(f"{chosen.key}={format_value(chosen.value)}", chosen.reason) for chosen in layout.keys]
    lines = ["layout=auto chose:", *table_lines(rows, indent="  ")] if rows else ["layout=auto: nothing to choose"]
    if (plan := layout.plan) is not None:
        usable = plan.usable_bytes / GIB
        phases = ", ".join(f"{phase.phase} {phase.nbytes / GIB:.1f}" for phase in plan.memory.phases)
        lines.append(f"  GiB per device, of {usable:.1f} usable: {phases}; host {plan.memory.host_bytes / GIB:.0f} GiB")
    return lines
