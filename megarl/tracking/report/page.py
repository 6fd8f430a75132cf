"""Writes the report: one HTML file that holds its data, its script and its style, and asks the network for nothing.

Rollouts are written by a model and prompts come from anywhere, so nothing of them is trusted: data travels as JSON that
cannot end its script element, the script puts it on the page as text only, and the page's content policy allows no
script but the page's own and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from megarl.tracking.report.charts import charts_of, metric_columns
from megarl.tracking.report.rollouts import RolloutSample, rollout_columns
from megarl.tracking.run_summary import duration

_UNSAFE_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def script_json(value: Any) -> str:
    """JSON that may stand in a script element: what could end the element, or open a comment, is escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # a lone surrogate, which a model's broken output may hold, is valid in a string but not in the file
    text = text.encode("utf-8", "replace").decode("utf-8")
    return re.sub("[<>&\u2028\u2029]", lambda match: _UNSAFE_IN_SCRIPT[match[0]], text)


def flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted key and value of every leaf of a nested config, as they stand on the command line."""
    leaves: list[tuple[str, str]] = []
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves += flatten(value, f"{name}.")
        else:
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            leaves.append((name, shown))
    return leaves


def summary_cards(summary: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """The figures at the top of the page: ``label``, ``value``, and a ``note`` with its ``tone`` where there is one."""
    cards: list[dict[str, str]] = []

    def add(label: str, value: str, note: str = "", tone: str = "") -> None:
        """One card."""
        cards.append({"label": label, "value": value, "note": note, "tone": tone})

    def change(label: str, first: float, last: float) -> None:
        """A card for something that should rise."""
        tone = "good" if last > first else "bad" if last < first else ""
        add(label, f"{last:.3f}", f"{last - first:+.3f} from {first:.3f}", tone)

    before, after = summary.get("val_accuracy_before"), summary.get("val_accuracy_after")
    if before is not None and after is not None:
        change("Held-out accuracy", before, after)
    elif after is not None:
        add("Held-out accuracy", f"{after:.3f}")
    rewards = [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]
    if rewards:
        change("Reward", rewards[0], rewards[-1])
    if summary.get("steps") is not None:
        add("Steps", f"{summary['steps']:,}")
    train, wall = (summary.get(name) for name in ("train_seconds", "wall_seconds"))
    if train is not None:
        add("Training", duration(train), f"whole run {duration(wall)}" if wall is not None else "")
    elif wall is not None:
        add("Whole run", duration(wall))
    for label, name, note in (
        ("Rollout", "rollout_tokens_per_s", "tokens/s generated"),
        ("Update", "update_tokens_per_s", "tokens/s trained on"),
    ):
        if summary.get(name) is not None:
            add(label, f"{summary[name]:,.0f}", note)
    return cards


def page_data(
    metrics_rows: Sequence[Mapping[str, float]],
    rollouts: RolloutSample,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that the page shows, ready for JSON."""
    metrics = metric_columns(metrics_rows)
    return {
        "steps": [int(row["step"]) for row in metrics_rows],
        "metrics": metrics,
        "charts": charts_of(list(metrics)),
        "cards": summary_cards(summary, metrics_rows),
        "files": [[label, str(summary[name])] for label, name in (("Policy", "hf_dir"),) if summary.get(name)],
        "rollouts": rollout_columns(rollouts.rows),
        "rollouts_total": rollouts.total,
        "config": flatten(config),
    }


def _resource(name: str) -> str:
    return resources.files("megarl.tracking.report").joinpath(name).read_text(encoding="utf-8")


def _source_hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def render_report(data: Mapping[str, Any], title: str, subtitle: str = "") -> str:
    """The page as text; ``data`` as :func:`page_data` gives it."""
    from plotly.offline import get_plotlyjs

    plotly, script = get_plotlyjs(), _resource("page.js")
    parts = {
        "POLICY": f"default-src 'none'; script-src {_source_hash(plotly)} {_source_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'",
        "TITLE": html.escape(title),
        "SUBTITLE": html.escape(subtitle),
        "STYLE": _resource("page.css"),
        "PLOTLY": plotly,
        "DATA": script_json(data),
        "SCRIPT": script,
    }
    # one pass, so that a rollout that spells a placeholder stays what it is
    return re.sub(r"%%([A-Z]+)%%", lambda match: parts[match[1]], _resource("page.html"))


def write_report(
    path: Path | str,
    metrics_rows: Sequence[Mapping[str, float]],
    rollouts: RolloutSample,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    title: str = "megarl",
    subtitle: str = "",
) -> Path:
    """Write the report of a run; a reader sees the old page or the whole new one.

    Args:
        path: the HTML file; its folder is made.
        metrics_rows: rows of the metrics file, as :func:`megarl.tracking.read_metrics` gives them.
        rollouts: as :func:`megarl.tracking.read_rollouts` gives them.
        config: the resolved config, plain nested dicts and lists.
        summary: ``val_accuracy_before, val_accuracy_after, steps, train_seconds, wall_seconds, rollout_tokens_per_s,
            update_tokens_per_s, hf_dir``; what is missing or None is left out.
        title: name of the run.
        subtitle: a line under it.

    Returns:
        The path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = render_report(page_data(metrics_rows, rollouts, config, summary), title, subtitle)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path
