"""Names of compared runs: the few settings that differ between them, with short keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.ops.report.run_files import RunRecord

MOST_SETTINGS = 3
MOST_CHARACTERS = 24
_NOT_LEARNED_FROM = (
    "trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name", "trainer.logger",
    "trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.hf_export_dir", "trainer.overwrite_output",
    "trainer.resume_mode", "trainer.resume_from_path",
)  # fmt: skip
"""Settings of folders and records; they name no run."""
_CONFIG = "config"

Values = dict[str, list[str | None]]


def run_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return unique names of runs: the settings that differ between them, experiment names, or folder names."""
    if len(runs) == 1:
        return [runs[0].name]
    differing = _setting_names(_distinguishing(_differing_settings(runs)), len(runs))
    for names in (differing, [run.name for run in runs], [run.folder.name for run in runs]):
        if all(names) and len(set(names)) == len(names):
            return list(names)
    return [f"{number}: {differing[number] or runs[number].name}" for number in range(len(runs))]


def _differing_settings(runs: Sequence[RunRecord]) -> Values:
    """Values by run of the configuration's name and of the overridden keys, if they differ; None = unknown."""
    overrides = [dict(_key_and_value(str(text)) for text in run.facts.get("overrides", ())) for run in runs]
    values: Values = {_CONFIG: [run.facts.get("config_name") for run in runs]}
    for key in dict.fromkeys(key for of_run in overrides for key in of_run):
        if key not in _NOT_LEARNED_FROM:
            values[key] = [of_run.get(key, _setting(run, key)) for of_run, run in zip(overrides, runs, strict=True)]
    return {key: of_runs for key, of_runs in values.items() if len(set(of_runs)) > 1}


def _key_and_value(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+~"), value.strip("'\"")


def _setting(run: RunRecord, key: str) -> str | None:
    value = run.setting(key)
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _distinguishing(values: Values) -> Values:
    """Keep all settings if they are few, else the fewest that make the runs differ, found greedily."""
    if len(values) <= MOST_SETTINGS:
        return values

    def classes(keys: Sequence[str]) -> int:
        """Number of runs that the settings tell apart."""
        return len(set(zip(*(values[key] for key in keys), strict=True)))

    chosen: list[str] = []
    while len(chosen) < MOST_SETTINGS:
        best = max((key for key in values if key not in chosen), key=lambda key: classes([*chosen, key]))
        if chosen and classes([*chosen, best]) == classes(chosen):
            break
        chosen.append(best)
    return {key: values[key] for key in values if key in chosen}


def _setting_names(values: Values, count: int) -> list[str]:
    names: list[list[str]] = [[] for _ in range(count)]
    for key, short in _short_keys(list(values)).items():
        for name, value in zip(names, _short_values(values[key]), strict=True):
            if value is not None:
                name.append(value if key == _CONFIG else f"{short}={value}")
    return [" ".join(name) for name in names]


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Shorten ``a.b.key`` to ``key``; keys with the same end keep the last part that differs: ``actor.lr``."""
    short = {}
    for key in keys:
        parts = key.split(".")
        rivals = [other.split(".") for other in keys if other != key and other.endswith(f".{parts[-1]}")]
        parents = list(reversed(parts[:-1]))
        differs = [parent for parent in parents if any(parent not in other for other in rivals)]
        short[key] = f"{differs[0]}.{parts[-1]}" if rivals and differs else parts[-1]
    return short


def _short_values(values: Sequence[str | None]) -> list[str | None]:
    """Shorten values: paths lose the folders and names that they share, long texts their middle."""
    paths = [value.split("/") if value is not None else None for value in values]
    filled_paths = [path for path in paths if path is not None]
    if len(filled_paths) > 1 and all(len(path) > 1 for path in filled_paths):
        least = min(map(len, filled_paths))
        begin = next((n for n in range(least) if len({path[n] for path in filled_paths}) > 1), least - 1)
        end = next((n for n in range(least - begin) if len({path[-1 - n] for path in filled_paths}) > 1), 0)
        return [None if path is None else _cut("/".join(path[begin : len(path) - end])) for path in paths]
    return [None if value is None else _cut(value) for value in values]


def _cut(text: str) -> str:
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[: half - 1]}…{text[-half:]}"
