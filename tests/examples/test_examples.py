"""Results of the examples; tests/e2e/test_e2e_docs.py trains with all of them together."""

import asyncio
import dataclasses
import json
import re
import shlex
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from support.expected_errors import raises

from megarl import cli
from megarl.agents import Conversation
from megarl.agents.tools import ToolCall, answer_call, load_tools
from megarl.algorithms import AdvantageInputs, PolicyLossInputs
from megarl.base.user_code import import_file
from megarl.config import TrainConfig
from megarl.data import DataProto
from megarl.rollout.interface import SamplingParams
from megarl.tracking import RunInfo, open_trackers
from megarl.trainer.callbacks import TrainerView
from megarl.workers.actor import loss_options

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.usefixtures("at_root")
def test_command_in_the_docstring_is_valid(file, capsys):
    text = import_file(str(file)).__doc__ or ""
    (command,) = re.findall(r"^(?:python|megarl) .*(?:\\\n.*)*", text, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    assert any(word.partition(":")[0].endswith(f"examples/{file.name}") for word in words) or file.stem in (
        "tool",
        "dataset",
    ), "the command must name the file"
    if words[0] == "megarl":
        assert cli.run_job(words[1], [*words[2:], "--cfg", "job"]) == 0, capsys.readouterr().err


def test_readme_lists_every_file():
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    files = {file.name for file in (ROOT / "examples").iterdir() if file.suffix in (".py", ".yaml", ".ipynb")}
    assert files == set(re.findall(r"`examples/([\w.]+)`", page))


def test_estimator():
    """Scores 0, 1, 5 of group a have the median 1, and scores 2, 4 of group b have 3; the last row is masked."""
    inputs = AdvantageInputs(
        token_level_rewards=torch.tensor([[0.0, 0.0], [0.5, 0.5], [0.0, 5.0], [2.0, 0.0], [4.0, 0.0], [9.0, 9.0]]),
        response_mask=torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0], [1, 0], [0, 0]]),
        group_ids=np.array(["a", "a", "a", "b", "b", "a"], dtype=object),
    )
    advantages, returns = import_file(str(ROOT / "examples/estimator.py")).median_baseline(inputs)
    expected = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [4.0, 4.0], [-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected)


def test_policy_loss():
    """Loss and gradient by definition at A = 2, eps = 0.2.

    At ratio 1 the loss is -2 and the gradient is -A; ratio 1.2 is the optimum; at 1.4 the gradient has the other sign.
    """
    loss = import_file(str(ROOT / "examples/policy_loss.py")).simple_policy_optimization
    ratio = torch.tensor([1.0, 1.2, 1.4], dtype=torch.float64)
    log_prob = ratio.log().requires_grad_()
    options = dataclasses.replace(loss_options(TrainConfig().actor_rollout_ref.actor), clip_ratio_high=0.2)
    inputs = PolicyLossInputs(log_prob, torch.zeros(3), torch.full((3,), 2.0), torch.ones(3), options=options)
    result = loss(inputs)
    torch.testing.assert_close(result.loss, torch.tensor([-2.0, -2.2, -2.0]).double())
    result.loss.sum().backward()
    by_ratio = log_prob.grad / ratio
    torch.testing.assert_close(by_ratio, torch.tensor([-2.0, 0.0, 2.0]).double(), atol=1e-12, rtol=0)
    assert result.diagnostics["beyond"].tolist()[::2] == [0.0, 1.0]


@pytest.mark.usefixtures("at_root")
def test_tool():
    tools = load_tools("examples/tools.yaml")
    conversation = Conversation([{"role": "user", "content": "?"}], SamplingParams(max_new_tokens=8), [1], key="k")

    def calculate(expression):
        return asyncio.run(answer_call(ToolCall("calculate", {"expression": expression}), tools, conversation)).content

    assert calculate("2 * (3 + 4) / 4") == "3.5" and calculate("-1/3") == "-0.333333"
    for wrong in ("1/0", "2+", "__import__('os').getcwd()", "'a' * 3"):
        assert calculate(wrong).startswith("Error: "), wrong


def test_callback(tmp_path):
    """Scores 0 and 1 of group a have the standard deviation 1/2; the scores of group b are equal."""
    callback = import_file(str(ROOT / "examples/callback.py")).GroupSpread()
    scores = torch.tensor([[0.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
    batch = DataProto.from_dict({"token_level_scores": scores}, {"uid": ["a", "a", "b", "b"]})
    view = TrainerView(TrainConfig(), tmp_path, step=1, total_steps=2, epoch=0, batch=batch)
    assert callback.on_step_end(view) == {"custom/group_score_std": 0.25}
    callback.on_save(dataclasses.replace(view, checkpoint=tmp_path / "global_step_1"))
    assert (tmp_path / "saves.txt").read_text(encoding="utf-8") == f"{tmp_path / 'global_step_1'}\n"


def test_reward():
    score = import_file(str(ROOT / "examples/reward.py")).compute_score
    assert score("arithmetic", " 42 ", "42", {}) == {"score": 1.0, "digits": 1.0, "pred": "42"}
    assert score("arithmetic", "41", "42", {}) == {"score": 0.0, "digits": 0.5, "pred": "41"}


@pytest.mark.usefixtures("at_root")
def test_tracker(tmp_path, monkeypatch):
    posts = []

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self):
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words):
            """Suppress the request log."""

    run = RunInfo("project", "mine", tmp_path)
    monkeypatch.delenv("WEBHOOK_URL", raising=False)
    with raises("tracking.webhook-url", "WEBHOOK_URL"):
        open_trackers(["examples/tracker.py:Webhook"], run)
    with HTTPServer(("127.0.0.1", 0), Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WEBHOOK_URL", f"http://127.0.0.1:{server.server_port}")
        trackers = open_trackers(["examples/tracker.py:Webhook"], run)
        for step, accuracy in enumerate((0.25, 0.5, 0.5, 0.375)):
            trackers.log({"val-core/sums/mean@1": accuracy, "actor/entropy": 9.0 + step}, step)
        trackers.finish()
        server.shutdown()
    assert posts == ["mine, step 0: val-core/sums/mean@1 0.250", "mine, step 1: val-core/sums/mean@1 0.500"]


def compare(place, file):
    return import_file(file).largest_difference(place.port)


def test_model_family(pool):
    assert pool.run(compare, 1, str(ROOT / "examples/compare_model_family.py"))[0] < 1e-5


def test_add_a_model_page_shows_the_example():
    """The page omits the type annotations."""
    text = (ROOT / "examples/model_family.py").read_text(encoding="utf-8")
    shown = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/how_to/add_a_model.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    family = (
        shown[0].partition("@register_family")[2].replace("(self, raw)", "(self, raw: Mapping[str, Any]) -> Traits")
    )
    assert family.strip() in text
