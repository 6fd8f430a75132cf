"""The page as a file: content, escaping, size."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import random
import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
from report_runs import HOSTILE, sample

from megarl.ops.report import compare_runs, report_run
from megarl.ops.report.page import compressed, run_names, script_json, summary_cards, write_page
from megarl.ops.report.run_files import RunRecord, read_run

LR, CRITIC_LR = "actor_rollout_ref.actor.optim.lr", "critic.optim.lr"


class Page(HTMLParser):
    """Collect scripts by ID, the content policy, and all addresses of elements."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.scripts: dict[str, str] = {}
        self.policy, self.addresses, self.texts = "", [], []
        self._open: str | None = None
        self._script = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self._open = tag
        self.addresses += [attributes[name] for name in ("src", "href", "action") if name in attributes]
        if tag == "script":
            self._script = attributes.get("id", "")
            assert self._script not in self.scripts
            self.scripts[self._script] = ""
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open == "script":
            self.scripts[self._script] += data
        else:
            self.texts.append((self._open, data))

    def unpacked(self, name):
        return gzip.decompress(base64.b64decode(self.scripts[name])).decode()

    @property
    def data(self):
        return json.loads(self.unpacked("data"))


def test_page_contains_the_run_and_escapes_its_texts(make_run):
    folder = make_run(samples={1: [sample(0, 1, HOSTILE, input=HOSTILE, pred=HOSTILE)]})
    path = report_run(folder)
    assert path == folder / "report.html"
    page = Page(path)
    assert list(page.scripts) == ["plotly", "data", ""], "no text of the run makes an element"
    data = page.data
    assert data["rollouts"]["output"] == data["rollouts"]["input"] == [HOSTILE]
    assert data["rollouts"]["extra"] == [{"pred": HOSTILE}] and data["rollouts_total"] == 1
    (run,) = data["runs"]
    reward = run["metrics"]["critic/score/mean"]
    assert run["axes"][reward["x"]] == list(range(1, 11)) and reward["y"] == [step / 10 for step in range(1, 11)]
    assert run["clock"]["seconds"][:3] == [5.0, 7.0, 9.0] and run["clock"]["seconds"][-1] == 28.0
    assert run["policy"] == "/out/<hf>" and run["status"] == "finished"
    assert [text for tag, text in page.texts if tag in ("title", "h1")] == ["exp", "exp"]
    assert sorted(entry.name for entry in folder.iterdir() if "tmp" in entry.name) == [], "no half-written file is left"


def test_page_makes_no_network_requests(make_run):
    page = Page(report_run(make_run()))
    assert all(address.startswith("#") for address in page.addresses)
    assert "default-src 'none'" in page.policy and "connect-src" not in page.policy
    allowed = re.search(r"script-src ([^;]*)", page.policy)
    digests = [hashlib.sha256(text.encode()).digest() for text in (page.unpacked("plotly"), page.scripts[""])]
    assert allowed is not None
    assert allowed[1].split() == [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]


def test_title_is_escaped(make_run, tmp_path):
    path = write_page(tmp_path / "page.html", [read_run(make_run())], HOSTILE)
    page = Page(path)
    assert [text for tag, text in page.texts if tag in ("title", "h1")] == [HOSTILE, HOSTILE]


def test_empty_run_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    data = Page(report_run(tmp_path, tmp_path / "elsewhere" / "page.html")).data
    (run,) = data["runs"]
    assert data["groups"] == [] and run["cards"] == [] and data["rollouts"]["step"] == [] and data["config"] == []
    assert run["verdict"] == "The run has logged nothing yet."


def test_answers_are_dropped_until_the_page_fits(make_run, tmp_path):
    noise = random.Random(0)
    letters = [chr(code) for code in range(0x4E00, 0x5E00)]
    answers = {
        step: [sample(n, step, "".join(noise.choices(letters, k=3000))) for n in range(10)] for step in range(1, 21)
    }
    run = read_run(make_run(samples=answers))
    bare = write_page(tmp_path / "bare.html", [read_run(make_run("bare", samples={}))], "t").stat().st_size
    path = write_page(tmp_path / "page.html", [run], "t", most_bytes=bare + 300_000)
    assert bare < path.stat().st_size < bare + 300_000
    data = Page(path).data
    assert data["rollouts_total"] == 200 and 0 < len(data["rollouts"]["step"]) < 200
    assert set(data["rollouts"]["step"]) == set(range(1, 21)), "some of every step"
    with pytest.raises(ValueError, match=r"page.html: a page of 1 runs takes .* of 1,000 allowed"):
        write_page(tmp_path / "page.html", [run], "t", most_bytes=1000)


def test_page_of_ten_thousand_steps_is_small(make_run):
    noise = random.Random(1)
    names = [f"group/metric_{number}" for number in range(150)]
    rows = [{"step": step, **{name: noise.random() for name in names}} for step in range(1, 10_001)]
    rows[4321]["group/metric_7"] = 1e6
    folder = make_run(rows=[])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = report_run(folder)
    assert path.stat().st_size < 10_000_000
    (run,) = Page(path).data["runs"]
    curve = run["metrics"]["group/metric_7"]
    assert len(curve["y"]) == 600 and max(curve["high"]) == 1e6, "the only spike is kept"
    assert len(run["axes"]) == 1


def test_comparison_contains_all_runs(make_run, tmp_path):
    sweep = tmp_path / "sweep"
    for number, lr in enumerate((1e-6, 1e-5, 1e-4)):
        make_run(f"sweep/{number}", lr=lr)
    path = compare_runs([sweep])
    assert path == sweep / "comparison.html"
    page = Page(path)
    data = page.data
    assert data["title"] == "3 runs of exp"
    assert [run["name"] for run in data["runs"]] == ["lr=1e-06", "lr=1e-05", "lr=0.0001"]
    (row,) = [row for row in data["config"] if row["key"] == "optim.lr"]
    assert row["values"] == ["1e-06", "1e-05", "0.0001"] and row["default"] == "0.001"
    assert data["rollouts"]["run"].count(2) == 6
    assert compare_runs([sweep / "1"], tmp_path / "one.html").exists(), "a single run gets its report"


def test_json_for_the_page_is_json():
    value = {"a": HOSTILE, "b": "\u2029 \ud800"}
    assert json.loads(script_json(value)) == {"a": HOSTILE, "b": "\u2029 ?"}
    assert set(compressed(HOSTILE)) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
    assert compressed("x") == compressed("x"), "the same page is the same bytes"
    with pytest.raises(ValueError, match="JSON"):
        script_json(float("nan"))


def test_cards(make_run):
    cards = {card["label"]: card for card in summary_cards(read_run(make_run()))}
    assert cards["Held-out accuracy"] == {
        "label": "Held-out accuracy", "value": "0.750", "note": "+0.500 from 0.250", "tone": "good",
    }  # fmt: skip
    assert cards["Training"]["value"] == "20.0 s" and cards["Training"]["note"] == "whole run 1 min 40 s"
    assert cards["Steps"]["value"] == "10" and cards["Steps"]["note"] == "2.0 s each"


def test_answers_and_config_stack_in_narrow_windows():
    """The style of the tables at 390 pixels: rows and cells are blocks, and no table has a minimum width."""
    style = resources.files("megarl.ops.report").joinpath("page", "page.css").read_text(encoding="utf-8")
    found = re.search(r"@media \(max-width: (\d+)px\) \{\n(.*?)\n\}", re.sub(r"/\*.*?\*/", "", style), re.DOTALL)
    assert found is not None
    widest, narrow = found.groups()
    assert int(widest) >= 390
    rules = dict(re.findall(r"^  (\S[^{}]*?) \{ ([^{}]*) \}$", narrow, re.MULTILINE))
    assert "min-width: 0" in rules["#table, .config"] and "display: block" in rules["#table, .config"]
    assert "display: block" in rules[":is(#table, .config) :is(tbody, tr, td, th)"]
    assert not re.search(r"min-width: (?!0|92px)", narrow), "no part wider than the label of a cell"


def run(folder, name, overrides, config=None, config_name="ppo"):
    facts = {"overrides": overrides, "config_name": config_name}
    return RunRecord(Path(folder), name, [], config=config or {}, facts=facts)


def names(*overrides):
    return run_names([run(str(number), "x", texts) for number, texts in enumerate(overrides)])


def test_run_names_are_unique():
    assert run_names([run("a", "x", [])]) == ["x"]
    assert run_names([run("a", "x", ["s=1", "a.lr=2"]), run("b", "x", ["s=1", "a.lr=3"])]) == ["lr=2", "lr=3"]
    assert run_names([run("a", "x", []), run("b", "y", ["lr=3"])]) == ["x", "y"]
    assert run_names([run("a", "x", []), run("b", "x", [])]) == ["a", "b"]
    assert run_names([run("1/a", "x", []), run("2/a", "x", [])]) == ["0: x", "1: x"]


def test_equal_ends_of_keys_keep_the_part_that_differs():
    assert names([f"{LR}=1", f"{CRITIC_LR}=1"], [f"{LR}=2", f"{CRITIC_LR}=3"]) == [
        "actor.lr=1 critic.lr=1", "actor.lr=2 critic.lr=3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["/data/gsm8k/train.parquet", "/data/math/train.parquet"], ["f=gsm8k", "f=math"]),
        (["/a/b/model", "/a/b/other"], ["f=model", "f=other"]),
        (["/a/b", "/a/b/c"], ["f=b", "f=b/c"]),
        (["x" * 10 + "1" * 20, "y" * 10 + "2" * 20], ["f=xxxxxxxxxx1…111111111111", "f=yyyyyyyyyy2…222222222222"]),
    ],
)
def test_values_are_short(values, expected):
    assert names(*([f"data.f={value}"] for value in values)) == expected


def test_many_differences_are_reduced_to_those_that_distinguish_the_runs():
    """Eight differing overrides; the seed alone tells the runs apart."""
    others = [[f"a.k{key}={number % 2}" for key in range(7)] for number in range(4)]
    assert names(*([*texts, f"trainer.seed={number}"] for number, texts in enumerate(others))) == [
        "seed=0", "seed=1", "seed=2", "seed=3",
    ]  # fmt: skip


def test_folders_and_defaults():
    """Output folders name no run; the value of a run without the override comes from its configuration."""
    config = {"algorithm": {"gamma": 1.0, "norm": True}}
    runs = [
        run("a", "x", ["trainer.default_local_dir=/very/long/1"], config),
        run("b", "x", ["trainer.default_local_dir=/very/long/2", "algorithm.gamma=0.9", "+algorithm.norm=false"]),
    ]
    assert run_names(runs) == ["gamma=1.0 norm=true", "gamma=0.9 norm=false"]


def test_name_of_the_configuration_distinguishes_runs():
    runs = [run("a", "x", [], config_name="quickstart"), run("b", "x", ["a.n=2"], config_name="quickstart_grpo")]
    assert run_names(runs) == ["quickstart", "quickstart_grpo n=2"]
