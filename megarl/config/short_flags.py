"""Arguments of a configuration, and flags for keys: ``megarl grpo --model FOLDER --data FILE --reward gsm8k``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from megarl.base.errors import ConfigError
from megarl.base.hub_names import is_data_name
from megarl.config.keys import walk
from megarl.config.overrides import override_of
from megarl.config.problems import nearest_keys
from megarl.config.schema.jobs import TEACHERS
from megarl.config.schema.rewards import BUILT_IN_REWARDS

_MODEL = ("actor_rollout_ref.model.path", "model.path")
_REWARD, _TEACHER = "reward.name", f"{TEACHERS}.teacher_models"


class _Flag(NamedTuple):
    """Command-line flag for the first of its keys that a job has; jobs without them lack the flag."""

    keys: tuple[str, ...]
    metavar: str
    help: str
    overrides: Callable[[str, Any], Iterable[tuple[str, Any]]]
    """Keys and values from the flag's key and value."""
    many: bool = False


def _data(key: str, value: list[str]) -> Iterator[tuple[str, Any]]:
    split = "test" if key == "data.val_files" else "train"
    yield key, [f"hf://datasets/{name}/**/{split}*.parquet" if is_data_name(name) else name for name in value]


def _reward(key: str, value: str) -> Iterator[tuple[str, Any]]:
    if value.startswith(("http://", "https://")):
        yield from ((key, "judge"), ("reward.judge.base_url", value))
    elif value in BUILT_IN_REWARDS or ":" in value or value.endswith(".py"):
        yield key, value
    elif "/" in value:
        yield from (("reward.model.enable", True), ("reward.model.path", value))
    else:
        nearest = nearest_keys(value, BUILT_IN_REWARDS)
        raise ConfigError(
            f"--reward {value}: {f'did you mean {nearest[0]}? ' if nearest else ''}Give one of "
            f"{', '.join(BUILT_IN_REWARDS)}, a function as path.py:name, a reward model (folder or owner/name of the "
            "Hub), or the http:// address of a judge",
            code="reward.unknown-name",
        )


def _teacher(key: str, value: str) -> Iterator[tuple[str, Any]]:
    yield from ((f"{TEACHERS}.enabled", True), (f"{key}.teacher.model_path", value))


_FLAGS = {
    "model": _Flag(_MODEL, "MODEL", "folder, or owner/name of the Hugging Face Hub", lambda key, value: [(key, value)]),
    "data": _Flag(
        ("data.train_files", "data.val_files"),
        "FILE",
        "parquet, JSONL, a folder of datasets, or owner/name of the Hub",
        _data,
        True,
    ),
    "val-data": _Flag(("data.val_files",), "FILE", "the same, for validation", _data, True),
    "reward": _Flag(
        (_REWARD,), "REWARD", "name of a reward, path.py:function, a reward model, or the address of a judge", _reward
    ),
    "teacher": _Flag((_TEACHER,), "MODEL", "teacher of the distillation, as --model", _teacher),
}


def add_config_arguments(parser: argparse.ArgumentParser, file_help: str) -> None:
    """Add the overrides, the YAML file and its folder."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the YAML file")
    parser.add_argument("--config-name", "-cn", type=lambda name: name.removesuffix(".yaml"), help=file_help)
    parser.add_argument("--config-dir", "-cd", help="folder with YAML files, searched before megarl's own")


def add_flags(parser: argparse.ArgumentParser, schema: type) -> None:
    """Add the flags whose keys a job has."""
    for name, (flag, key) in _flags_of(schema).items():
        text = f"{flag.help}{'; may be repeated' if flag.many else ''} ({key})"
        parser.add_argument(f"--{name}", metavar=flag.metavar, help=text, action="append" if flag.many else "store")


def flag_overrides(options: argparse.Namespace, schema: type) -> list[str]:
    """Translate the flags of a command line to overrides.

    Raises:
        ConfigError: ``--reward`` names no reward.
    """
    values = {name: getattr(options, name.replace("-", "_")) for name in _flags_of(schema)}
    settings = [
        setting
        for name, (flag, key) in _flags_of(schema).items()
        if values[name] is not None
        for setting in flag.overrides(key, values[name])
    ]
    return [override_of(path, value) for path, value in settings]


def _flags_of(schema: type) -> dict[str, tuple[_Flag, str]]:
    """Flags of a job by name, each with its key."""
    keys = {path for path, _ in walk(schema)}
    result: dict[str, tuple[_Flag, str]] = {}
    for name, flag in _FLAGS.items():
        key = next((key for key in flag.keys if key in keys), None)
        if key is not None and key not in {other for _, other in result.values()}:
            result[name] = flag, key
    return result
