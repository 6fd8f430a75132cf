import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from megarl.tracking import RolloutSample, read_rollouts, write_report
from megarl.tracking.report.charts import charts_of, metric_columns
from megarl.tracking.report.page import flatten, script_json, summary_cards
from megarl.tracking.report.rollouts import shorten

HOSTILE = (
    "</script><script>document.title='taken'</script><!--<script> %%DATA%% &lt; \u2028 <img src=x onerror=alert(1)>"
)


class Page(HTMLParser):
    """Collects scripts, styles, the content policy, and every address that an element asks for."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.scripts, self.policy, self.addresses, self.texts = [], "", [], []
        self._open = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self._open = tag
        self.addresses += [attributes[name] for name in ("src", "href", "action") if name in attributes]
        if tag == "script":
            self.scripts.append((attributes.get("type", "text/javascript"), ""))
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
        else:
            self.texts.append((self._open, data))


@pytest.fixture
def rows():
    same = {"timing_s/gen": 1.0, "timing_s/step": 2.0, "actor/entropy": float("nan")}
    steps = [{"step": step, "critic/score/mean": step / 4, **same} for step in range(1, 4)]
    return [{"step": 0, "val-core/a</script>/reward/mean@1": 0.25}, *steps]


@pytest.fixture
def report(tmp_path, rows):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step in (1, 2):
        entries = [{"input": "2+2", "output": HOSTILE, "gts": {"a": [1]}, "score": 1.0, "step": step}] * 30
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    summary = {"val_accuracy_before": 0.25, "val_accuracy_after": 0.75, "steps": 3, "hf_dir": "/out/<hf>"}
    config = {"actor": {"lr": 1e-6, "on": True, "none": None, "text": HOSTILE, "empty": {}}}
    return write_report(tmp_path / "out" / "report.html", rows, read_rollouts(folder), config, summary, title="run <1>")


def test_the_page_holds_its_data_and_nothing_escapes(report):
    text = report.read_text(encoding="utf-8")
    page = Page(text)
    assert [kind for kind, _ in page.scripts] == ["text/javascript", "application/json", "text/javascript"]
    data = json.loads(page.scripts[1][1])
    assert data["rollouts"]["output"] == [HOSTILE] * 60 and data["rollouts"]["step"] == [1] * 30 + [2] * 30
    assert data["rollouts"]["gts"][0] == '{"a": [1]}' and data["rollouts_total"] == 60
    assert data["steps"] == [0, 1, 2, 3] and data["metrics"]["critic/score/mean"] == [None, 0.25, 0.5, 0.75]
    assert ["actor.text", HOSTILE] in data["config"] and ["actor.on", "true"] in data["config"]
    assert [text for tag, text in page.texts if tag in ("title", "h1")] == ["run <1>", "run <1>"]
    assert [path.name for path in report.parent.iterdir()] == ["report.html"], "no half-written file is left"


def test_the_page_asks_the_network_for_nothing(report):
    page = Page(report.read_text(encoding="utf-8"))
    assert all(address.startswith("#") for address in page.addresses)
    assert "default-src 'none'" in page.policy and "connect-src" not in page.policy
    allowed = re.search(r"script-src ([^;]*)", page.policy)[1].split()
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for kind, text in page.scripts
        if kind == "text/javascript"
    ]
    assert allowed == hashes, "only the page's own scripts may run"


def test_a_run_without_anything_still_has_a_page(tmp_path):
    path = write_report(tmp_path / "report.html", [], RolloutSample([], 0), {}, {})
    data = json.loads(Page(path.read_text(encoding="utf-8")).scripts[1][1])
    assert data["charts"] == [] and data["cards"] == [] and data["rollouts"]["step"] == []


def test_json_in_a_script_is_json_and_cannot_end_it():
    value = {"a": HOSTILE, "b": "\u2029 \ud800"}
    text = script_json(value)
    assert "<" not in text and ">" not in text and "\u2028" not in text and "\u2029" not in text
    assert json.loads(text) == {"a": HOSTILE, "b": "\u2029 ?"}
    text.encode("utf-8")
    with pytest.raises(ValueError, match="JSON"):
        script_json(float("nan"))


def test_charts_show_what_the_run_has():
    names = [
        "actor/kl_loss", "critic/score/mean", "other/thing", "timing_s/adv", "timing_s/gen", "timing_s/save",
        "timing_s/step", "val-core/arithmetic/reward/mean@1",
    ]  # fmt: skip
    charts = {chart["title"]: chart for chart in charts_of(names)}
    assert list(charts) == ["Reward", "Held-out accuracy", "KL", "Time per phase"]
    assert charts["Held-out accuracy"]["series"] == [
        {"metric": "val-core/arithmetic/reward/mean@1", "label": "arithmetic reward mean@1"}
    ]
    phases = [series["label"] for series in charts["Time per phase"]["series"]]
    assert phases == ["gen", "adv", "save"], "in the order of the step; the step itself is their sum"


def test_metric_columns_mark_what_is_missing():
    columns = metric_columns([{"step": 1, "a": 1.23456789}, {"step": 2, "b": float("inf")}])
    assert columns == {"a": [1.23457, None], "b": [None, None]}


def test_cards():
    summary = {"val_accuracy_before": 0.9, "val_accuracy_after": 0.5, "train_seconds": 90, "wall_seconds": 100}
    cards = {card["label"]: card for card in summary_cards(summary, [])}
    assert cards["Held-out accuracy"] == {
        "label": "Held-out accuracy",
        "value": "0.500",
        "note": "-0.400 from 0.900",
        "tone": "bad",
    }
    assert cards["Training"]["value"] == "1 min 30 s" and cards["Training"]["note"] == "whole run 1 min 40 s"


def test_config_reads_as_on_the_command_line():
    assert flatten({"a": {"b": {"c": 1}, "d": None}, "e": [1, 2], "f": False}) == [
        ("a.b.c", "1"), ("a.d", "null"), ("e", "[1, 2]"), ("f", "false"),
    ]  # fmt: skip


def test_rollouts_are_thinned_evenly_and_counted(tmp_path):
    train, validation = tmp_path / "train", tmp_path / "validation"
    for folder, steps in ((train, (1, 2, 10)), (validation, (0,))):
        folder.mkdir()
        for step in steps:
            lines = [json.dumps({"input": f"q{i}", "output": "a", "gts": "g", "score": i}) for i in range(100)]
            (folder / f"{step}.jsonl").write_text("\n".join(lines) + '\n{"input": "half wri')
    (train / "notes.jsonl").write_text("not a dump")
    sample = read_rollouts(train, validation, max_rows=40)
    assert sample.total == 400 and len(sample.rows) == 40
    assert [row["step"] for row in sample.rows[::10]] == [1, 2, 10, 0]
    assert [row["kind"] for row in sample.rows[::10]] == ["train"] * 3 + ["validation"]
    assert [row["score"] for row in sample.rows[:10]] == [float(score) for score in range(0, 100, 10)]
    assert read_rollouts(None, tmp_path / "nowhere") == RolloutSample([], 0)


def test_a_score_that_is_no_number_is_shown_as_none(tmp_path):
    scores = ["NaN", "null", '"high"', "true"]
    (tmp_path / "1.jsonl").write_text("".join(f'{{"input": "q", "score": {score}}}\n' for score in scores))
    assert [row["score"] for row in read_rollouts(tmp_path).rows] == [None, None, None, 1.0]


def test_long_texts_say_what_was_left_out():
    text = "a" * 10 + "b" * 10
    assert shorten(text, 20) == text
    assert shorten(text, 8) == "aaaa\n[… 12 characters left out …]\nbbbb"


def test_what_tools_wrote_is_marked(tmp_path):
    entry = {"input": "q", "output": "ab🙂cdef", "masked": [[1, 3], [5, 7]], "gts": "", "score": 1}
    (tmp_path / "1.jsonl").write_text(json.dumps(entry) + "\n" + json.dumps({**entry, "masked": []}) + "\n")
    with open(tmp_path / "1.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({**entry, "output": "a\u2028b\x85", "masked": []}, ensure_ascii=False) + "\n")
    marked, plain, separated = read_rollouts(tmp_path).rows
    assert separated["output"] == "a\u2028b\x85"
    assert marked["parts"] == [("a", False), ("b🙂", True), ("cd", False), ("ef", True)] and plain["parts"] is None
