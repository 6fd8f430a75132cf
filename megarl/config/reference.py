"""The page of every key, docs/reference/config.md, from the schema: ``python -m megarl.config.reference``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.config.keys import REQUIRED, Key, keys_of
from megarl.config.problems import format_value
from megarl.config.schema.jobs import (
    EvaluateConfig,
    GenerateConfig,
    PreferenceConfig,
    RewardTrainingConfig,
    SFTConfig,
    TrainConfig,
)
from megarl.config.schema.model import MegatronConfig, OptimConfig

_SHARED = {OptimConfig: "Optimizer", MegatronConfig: "Parallel layout"}

_INTRODUCTION = """\
# Configuration reference

Generated from the schema in `megarl/config/` by `python -m megarl.config.reference > docs/reference/config.md`;
do not edit.

The schema is the only source of defaults. The YAML files in `configs/` and the overrides on the command line state only
values that differ. A list with one entry may be written as the entry. A key that is not on this page is an error.

<!-- not run here: KEY=VALUE and mine stand for your keys and files -->
```bash
megarl train --config-name grpo --cfg job KEY=VALUE ...   # print the resolved configuration
megarl train --config-name grpo KEY=VALUE ...             # run
megarl train --config-dir mine --config-name my ...       # mine/my.yaml, with `defaults: [grpo, _self_]`
megarl train --multirun actor_rollout_ref.actor.optim.lr=1e-6,1e-5   # one run per value
```

Each run writes to `outputs/<experiment_name>/<time>`, with its complete configuration in `config.yaml`.
"""


def render_reference() -> str:
    """Render the page as Markdown."""
    jobs = (
        ("`megarl train`", TrainConfig),
        ("`megarl sft`", SFTConfig),
        ("`megarl reward-model`", RewardTrainingConfig),
        ("`megarl preference`", PreferenceConfig),
        ("`megarl evaluate`", EvaluateConfig),
        ("`megarl generate`", GenerateConfig),
    )
    parts = [_INTRODUCTION]
    for title, schema in jobs:
        parts.append(f"## {title}: {_doc(schema)}")
        if any(item.section is None for item in keys_of(schema)):
            parts.append(_table(schema()))
        same = _as_in_training(schema) if schema is not TrainConfig else []
        parts += _sections(schema, leave_out=same)
        if same:
            parts.append(f"As in `megarl train`: {', '.join(f'`{path}`' for path in same)}.")
    parts.append("## Shared sections")
    for shared, title in _SHARED.items():
        parts += [f"### {title}", _doc(shared), _table(shared())]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _as_in_training(schema: Any, training: Any = TrainConfig, prefix: str = "") -> list[str]:
    """Paths of the topmost sections that equal those of the training job."""
    training_items = {item.name: item for item in keys_of(training)}
    same = []
    for item in keys_of(schema):
        training_item, path = training_items.get(item.name), f"{prefix}{item.name}"
        if item.section is None or training_item is None or training_item.section is None:
            continue
        if training_item.default == item.default:
            same.append(path)
        else:
            same += _as_in_training(item.default, training_item.default, f"{path}.")
    return same


def _sections(schema: Any, prefix: str = "", leave_out: Sequence[str] = ()) -> Iterator[str]:
    for item in keys_of(schema):
        path = f"{prefix}{item.name}"
        if item.entry is not None and path not in leave_out:
            yield f"### `{path}.<name>`\n\n{_doc(item.entry)}"
            yield _table(item.entry())
        if item.section is None or item.section in _SHARED or path in leave_out:
            continue
        yield f"### `{path}`\n\n{_doc(item.section)}"
        if any(inner.section is None or inner.section in _SHARED for inner in keys_of(item.default)):
            yield _table(item.default)
        yield from _sections(item.default, f"{path}.", leave_out)


def _table(instance: Any) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for item in keys_of(instance):
        if item.section is None:
            limits = item.limits.describe()
            rows.append(_row(item.name, item.type_name, _default(item), item.doc + (f" ({limits})" if limits else "")))
        elif item.section in _SHARED:
            title = _SHARED[item.section]
            link = f"[{title}](#{title.lower().replace(' ', '-')})"
            rows.append(_row(item.name, item.type_name, _difference(item), f"{item.doc} See {link}.".strip()))
    return "\n".join(rows)


def _row(name: str, type_name: str, default: str, meaning: str) -> str:
    return f"| `{name}` | {type_name} | {default} | {meaning.replace('|', chr(92) + '|')} |"


def _default(item: Key) -> str:
    return "required" if item.default == REQUIRED else f"`{format_value(item.default)}`"


def _difference(item: Key) -> str:
    """Defaults of a role that differ from the shared section's."""
    if item.default is None:
        return "`null`"
    assert item.section is not None
    plain = {inner.name: inner.default for inner in keys_of(item.section)}
    changed = [f"`{i.name}: {format_value(i.default)}`" for i in keys_of(item.default) if i.default != plain[i.name]]
    return ", ".join(changed)


def _doc(schema: type) -> str:
    return inspect.getdoc(schema) or ""


if __name__ == "__main__":
    print(render_reference(), end="")
