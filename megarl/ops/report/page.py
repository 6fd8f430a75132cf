"""Page of the report: one HTML file with its data, script and style, and without network requests.

Prompts and model answers are untrusted. The data is base64 of compressed JSON, and the script inserts it as text only.
Images are small copies, encoded here from their pixels. The content policy of the page allows only the page's scripts
and no connection. Plotly (4.8 MB) is the largest part; it is compressed too (2 MB), which leaves most of the ten
megabytes to the run's data.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from megarl.base.atomic_write import atomic_write
from megarl.base.formatting import duration
from megarl.base.packages import require_package
from megarl.ops.report.charts import balance_maps, chart_groups, metric_curves, training_seconds
from megarl.ops.report.findings import failure_counts, final_metrics, run_findings, run_verdict
from megarl.ops.report.rollouts import ReportRollouts, read_rollouts, rollout_columns, token_columns
from megarl.ops.report.run_files import RunRecord, cli_text, config_rows, environment_rows, run_description
from megarl.tracking.sample_files import step_files

MOST_BYTES = 10_000_000  # size limit of a page; answers beyond it are dropped, and the page reports their number
ROLLOUT_BYTES = 6_000_000
MOST_POINTS_OF_ALL_RUNS = 2400
FEWEST_POINTS = 100
SCRIPTS = ("logic.js", "curves.js", "rollouts.js", "settings.js", "page.js")
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


def script_json(value: Any) -> str:
    """Encode values with arbitrary model output as JSON; lone surrogates become question marks."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode("utf-8")


def compressed(text: str) -> str:
    """Compress a text to base64 of gzip, deterministically; the page's script decompresses it."""
    return base64.b64encode(gzip.compress(text.encode("utf-8"), 6, mtime=0)).decode("ascii")


def summary_cards(run: RunRecord) -> list[dict[str, str]]:
    """Return the cards at the top of the page: ``label``, ``value``, and optionally ``note`` and ``tone``."""
    numbers, cards = final_metrics(run), []

    def add(label: str, value: str, note: str = "", tone: str = "") -> None:
        cards.append({"label": label, "value": value, "note": note, "tone": tone})

    def change(label: str, first: float, last: float) -> None:
        """Add a card for a value that should rise."""
        tone = "good" if last > first else "bad" if last < first else ""
        add(label, f"{last:.3f}", f"{last - first:+.3f} from {first:.3f}", tone)

    if "accuracy_after" in numbers:
        change("Held-out accuracy", numbers["accuracy_before"], numbers["accuracy_after"])
    rewards = [row["critic/score/mean"] for row in run.rows if "critic/score/mean" in row]
    if rewards:
        change("Reward", rewards[0], rewards[-1])
    if "loss" in numbers:
        add("Loss", f"{numbers['loss']:.3f}")
    if "steps" in numbers:
        seconds = numbers.get("step_seconds")
        add("Steps", f"{numbers['steps']:,.0f}", f"{duration(seconds)} each" if seconds else "")
    if "train_seconds" in numbers:
        wall = run.summary.get("wall_seconds")
        add("Training", duration(numbers["train_seconds"]), f"whole run {duration(wall)}" if wall else "")
    for label, name, note in (
        ("Rollout", "rollout_tokens_per_s", "tokens/s generated"),
        ("Update", "update_tokens_per_s", "tokens/s trained on"),
    ):
        if name in numbers:
            add(label, f"{numbers[name]:,.0f}", note)
    if "memory_gb" in numbers:
        add("Device memory", f"{numbers['memory_gb']:.1f}", "GB at the peak")
    return cards


def page_data(runs: Sequence[RunRecord], rollouts: ReportRollouts, title: str) -> dict[str, Any]:
    """Return all data of the page, as JSON values."""
    most = min(600, max(FEWEST_POINTS, MOST_POINTS_OF_ALL_RUNS // len(runs)))
    described: list[dict[str, Any]] = []
    for run, name in zip(runs, run_names(runs), strict=True):
        axes, metrics = metric_curves(run.rows, most)
        steps, seconds = training_seconds(run.rows)
        described.append(
            {
                "name": name,
                "folder": str(run.folder),
                "status": run.status,
                "verdict": run_verdict(run),
                "purpose": run_description(run),
                "cards": summary_cards(run),
                "findings": [finding._asdict() for finding in run_findings(run)],
                "failures": failure_counts(run.rows),
                "final": final_metrics(run),
                "policy": run.summary.get("hf_dir"),
                "rows": len(run.rows),
                "axes": axes,
                "metrics": metrics,
                "ranks": balance_maps(run.balance) if len(runs) == 1 else {},  # a map shows a single run
                "clock": {"steps": steps, "seconds": seconds},
            }
        )
    names = [name for run in described for name in run["metrics"]]
    return {
        "title": title,
        "runs": described,
        "groups": chart_groups(names, described[0]["ranks"] if described else ()),
        "rollouts": rollout_columns(rollouts.rows),
        "rollouts_total": rollouts.total,
        "rollouts_cut": rollouts.cut,
        "thumbnails": rollouts.thumbnails,
        "steps_with_answers": [len(step_files(run.train_samples)) for run in runs],
        "token_columns": token_columns(rollouts.rows),
        "config": config_rows(runs),
        "environment": environment_rows(runs),
    }


@cache
def _resource(name: str) -> str:
    return resources.files("megarl.ops.report").joinpath("page", name).read_text(encoding="utf-8")


@cache
def _plotly() -> tuple[str, str]:
    """Return Plotly's script, compressed, and its hash for the content policy."""
    require_package("plotly", "report", "the report")
    from plotly.offline import get_plotlyjs

    source = get_plotlyjs()
    return compressed(source), _source_hash(source)


def _source_hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def render_page(data: Mapping[str, Any]) -> str:
    """Render the page from the result of :func:`page_data`."""
    (plotly, plotly_hash), script = _plotly(), "\n".join(map(_resource, SCRIPTS))
    parts = {
        "POLICY": f"default-src 'none'; script-src {plotly_hash} {_source_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'",
        "TITLE": html.escape(str(data["title"])),
        "STYLE": _resource("page.css"),
        "PLOTLY": plotly,
        "DATA": compressed(script_json(data)),
        "SCRIPT": script,
    }
    # one pass, so that placeholders in the data are not replaced
    return re.sub(r"%%([A-Z]+)%%", lambda match: parts[match[1]], _resource("page.html"))


def write_page(path: Path, runs: Sequence[RunRecord], title: str, most_bytes: int = MOST_BYTES) -> Path:
    """Write the page of one run, or the comparison of several, atomically.

    Args:
        path: the HTML file; its folder is created.
        most_bytes: size limit. Answers are dropped until the page fits.

    Raises:
        ValueError: the page exceeds the limit even without answers.
    """
    budget = min(ROLLOUT_BYTES, most_bytes)
    while True:
        rollouts = read_rollouts(runs, budget)
        text = render_page(page_data(runs, rollouts, title)).encode("utf-8")
        if len(text) < most_bytes:
            break
        if not rollouts.rows:
            raise ValueError(f"{path}: a page of {len(runs)} runs takes {len(text):,} bytes, of {most_bytes:,} allowed")
        budget = budget // 2 if budget > 10_000 else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_bytes(text)
    return path


def run_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return unique names of runs: the settings that differ between them, experiment names, or folder names."""
    if len(runs) == 1:
        return [runs[0].name]
    values = _distinguishing(_differing_settings(runs))
    settings: list[list[str]] = [[] for _ in runs]
    for key, short in _short_keys(list(values)).items():
        for own, value in zip(settings, _short_values(values[key]), strict=True):
            if value is not None:
                own.append(value if key == _CONFIG else f"{short}={value}")
    differing = [" ".join(own) for own in settings]
    for names in (differing, [run.name for run in runs], [run.folder.name for run in runs]):
        if all(names) and len(set(names)) == len(names):
            return list(names)
    return [f"{number}: {differing[number] or runs[number].name}" for number in range(len(runs))]


def _differing_settings(runs: Sequence[RunRecord]) -> Values:
    """Values by run of the configuration's name and of the overridden keys, if they differ; None = unknown."""
    parts = [[str(text).partition("=") for text in run.facts.get("overrides", ())] for run in runs]
    overrides = [{key.lstrip("+~"): value.strip("'\"") for key, _, value in of_run} for of_run in parts]
    values: Values = {_CONFIG: [run.facts.get("config_name") for run in runs]}
    for key in dict.fromkeys(key for of_run in overrides for key in of_run):
        if key not in _NOT_LEARNED_FROM:
            stored = [None if (value := run.setting(key)) is None else cli_text(value) for run in runs]
            values[key] = [of_run.get(key, value) for of_run, value in zip(overrides, stored, strict=True)]
    return {key: of_runs for key, of_runs in values.items() if len(set(of_runs)) > 1}


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
