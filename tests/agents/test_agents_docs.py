"""The loop, the tool and the agents of docs/how_to/agents.md work as shown."""

import asyncio
import importlib.util
import re
from pathlib import Path

import pytest
from agent_cases import Scripted, lead_all, merging_tokenizer, sampling
from endpoint_cases import lead, listening, talk

from megarl.agents import Conversation
from megarl.agents.build import read_loop_file
from megarl.agents.external_agent import load_agent
from megarl.agents.loop import AGENT_LOOPS
from megarl.agents.tools import ToolCall, answer_call, load_tools

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how_to/agents.md").read_text(encoding="utf-8")
# examples/agent.py needs nothing; the page's agent needs openai, which SGLang's environment has.
AGENTS = ["examples/agent.py:check_twice", *(["my_agent.py:solve"] if importlib.util.find_spec("openai") else [])]
TALK = Conversation([{"role": "user", "content": "2+2?"}], sampling(), [1, 2], key="k", agent_name="ask_twice")


@pytest.fixture
def page_files(tmp_path, monkeypatch):
    """Write the page's code blocks to files, named by their first line."""
    for code in re.findall(r"```(?:python|yaml)\n(# (?:my_\w+\.py|\w+\.yaml).*?)```", PAGE, re.DOTALL):
        (tmp_path / re.match(r"# ([\w.]+)", code)[1].rstrip(",")).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_loop(page_files):
    ((name, entry),) = read_loop_file("loops.yaml").items()
    tokenizer = merging_tokenizer()
    loop = AGENT_LOOPS.find(entry["_target_"]).create(None, tokenizer, question=entry["question"])
    script = Scripted(tokenizer, ["5<|im_end|>", "4<|im_end|>"])
    (trajectory,) = asyncio.run(lead_all([TALK], {name: loop}, script))
    assert trajectory.error is None and trajectory.fields == {"question": "Are you sure?"}
    question = "<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(trajectory.response_ids) == f"5<|im_end|>\n{question}4<|im_end|>"


def test_the_tool(page_files):
    code = (page_files / "my_tools.py").read_text(encoding="utf-8")
    (page_files / "my_tools.py").write_text(f"def evaluate(text):\n    return eval(text)\n\n\n{code}", encoding="utf-8")
    tools = load_tools("tools.yaml")
    answers = [
        asyncio.run(answer_call(ToolCall("calculate", {"expression": text}), tools, TALK)) for text in ("2/3", "2+")
    ]
    assert answers[0].content == "0.667" and answers[0].metrics == {"calculations": 1.0}
    assert answers[1].content.startswith("Error: not an expression") and answers[1].malformed


@pytest.mark.parametrize("agent", AGENTS)
def test_the_agents(page_files, agent):
    tokenizer = merging_tokenizer()
    function = load_agent(agent if agent.startswith("my_") else str(ROOT / agent))
    facts = {"reward_model": {"ground_truth": "4"}}
    with listening(tokenizer) as endpoint:
        script = Scripted(tokenizer, ["5<|im_end|>", "4<|im_end|>"])
        (trajectory,) = lead(endpoint, script, function, [talk(facts=facts)])
    assert trajectory.num_turns == 4 and trajectory.metrics["branches_dropped"] == 0
    result = {"score": 1.0, "requests": 2.0} if agent.startswith("my_") else {"score": 0.5, "first": 0.0}
    assert trajectory.fields["agent_result"] == result
