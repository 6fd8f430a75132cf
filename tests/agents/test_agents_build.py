"""Building agent loops from a configuration, and refused configurations."""

import asyncio
import json
import sys

import pytest
from agent_cases import merging_tokenizer
from support.expected_errors import raises

from megarl.agents import (
    ConversationLimits,
    build_agent_loops,
    check_agent_loops,
    check_agent_names,
    conversation_limits,
    default_agent_loop,
)
from megarl.agents.loop import SingleTurnLoop
from megarl.agents.search_agent import SearchLoop
from megarl.agents.tool_agent import ToolLoop, ToolOptions
from megarl.config import TrainConfig
from megarl.config.build import build
from megarl.config.problems import InvalidConfigError

SCHEMA = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
USER_CODE = """
from megarl.agents import AgentLoop
from megarl.agents.tools import Tool

class Mine(AgentLoop):
    def __init__(self, factor):
        self.factor = factor

    async def run(self, conversation, generate):
        raise NotImplementedError

class Look(Tool):
    async def call(self, arguments, conversation):
        return "nothing"
"""


def configured(**sections):
    values = {
        "data": {"train_files": "a.parquet", "max_response_length": 600, **sections.pop("data", {})},
        "actor_rollout_ref": {"model": {"path": "model"}, "rollout": sections.pop("rollout", {})},
        "trainer": {"device": "cpu", "n_gpus_per_node": 1, "experiment_name": "agents"},
        **sections,
    }
    return build(TrainConfig, values)


@pytest.fixture(scope="module")
def tokenizer():
    return merging_tokenizer()


@pytest.fixture
def files(tmp_path):
    """A module with a custom loop and tool, and the YAML files that name them."""
    (tmp_path / "custom.py").write_text(USER_CODE, encoding="utf-8")
    tools = {"tools": [{"class_name": f"{tmp_path}/custom.py:Look", "tool_schema": SCHEMA}]}
    (tmp_path / "tools.yaml").write_text(json.dumps(tools), encoding="utf-8")
    loops = [{"name": "mine", "_target_": f"{tmp_path}/custom.py:Mine", "factor": 3}]
    (tmp_path / "loops.yaml").write_text(json.dumps(loops), encoding="utf-8")
    return tmp_path


def test_default_agent_loop(files):
    assert default_agent_loop(configured()) == "single_turn_agent"
    tools = {"enable": True, "tool_config_path": str(files / "tools.yaml")}
    assert default_agent_loop(configured(rollout={"multi_turn": tools})) == "tool_agent"
    searching = {"multi_turn": {"search": {"enable": True, "url": "http://127.0.0.1:1/retrieve"}}}
    assert default_agent_loop(configured(rollout=searching)) == "search_agent"
    external = {"agent": {"external_agent": "a.py:b"}}
    assert default_agent_loop(configured(rollout=external)) == "external_agent"
    chosen = {"agent": {"default_agent_loop": "mine"}}
    assert default_agent_loop(configured(rollout=chosen | searching)) == "mine"


def test_all_keys_reach_their_loop(files, tokenizer):
    config = configured(
        rollout={
            "multi_turn": {
                "max_assistant_turns": 6,
                "max_user_turns": 7,
                "max_parallel_calls": 8,
                "max_tool_response_length": 99,
                "tool_response_truncate_side": "left",
                "tool_config_path": str(files / "tools.yaml"),
                "format": "llama3_json",
                "search": {
                    "enable": True,
                    "url": "http://host:1/retrieve",
                    "topk": 4,
                    "max_turns": 5,
                    "max_obs_length": 77,
                    "timeout_s": 9,
                    "retries": 1,
                },
            },
            "agent": {"agent_loop_config_path": str(files / "loops.yaml"), "timeout_s": 30},
        },
    )
    names = ["single_turn_agent", "tool_agent", "search_agent", "mine", f"{files}/custom.py:Mine"]
    with raises("agent.loop-options", "'factor'"):
        build_agent_loops(config, tokenizer, names)
    loops = build_agent_loops(config, tokenizer, names[:-1])
    assert isinstance(loops["single_turn_agent"], SingleTurnLoop) and loops["mine"].factor == 3
    tool, search = loops["tool_agent"], loops["search_agent"]
    assert isinstance(tool, ToolLoop) and tool.options == ToolOptions("llama3_json", 8, 99, "left")
    assert list(tool.tools) == ["look"]
    assert isinstance(search, SearchLoop) and (search.max_turns, search.max_obs_length) == (5, 77)
    options = search.client.options
    assert (options.url, options.topk, options.timeout_s, options.retries) == ("http://host:1/retrieve", 4, 9, 1)
    assert conversation_limits(config) == ConversationLimits(600, 6, 7, 30, 512)
    assert asyncio.run(tool.tools["look"].tool.call({}, None)) == "nothing"


@pytest.mark.parametrize(
    ("sections", "key", "value"),
    [
        ({"rollout": {"multi_turn": {"search": {"enable": True}}}}, "multi_turn.search.url", None),
        ({"rollout": {"agent": {"default_agent_loop": "search_agent"}}}, "multi_turn.search.url", None),
        ({"rollout": {"agent": {"default_agent_loop": "external_agent"}}}, "agent.external_agent", None),
        (
            {
                "rollout": {
                    "agent": {"external_agent": "a.py:b"},
                    "multi_turn": {"search": {"enable": True, "url": "http://h/r"}},
                }
            },
            "agent.external_agent",
            "a.py:b",
        ),
        ({"rollout": {"endpoint": {"port": 65536}}}, "endpoint.port", 65536),
        ({"rollout": {"endpoint": {"host": ""}}}, "endpoint.host", ""),
        ({"rollout": {"multi_turn": {"search": {"url": "127.0.0.1:8000"}}}}, "multi_turn.search.url", "127.0.0.1:8000"),
        ({"rollout": {"multi_turn": {"enable": True}}}, "multi_turn.tool_config_path", None),
        ({"rollout": {"multi_turn": {"tool_config_path": "none.yaml"}}}, "multi_turn.tool_config_path", "none.yaml"),
        (
            {"rollout": {"agent": {"agent_loop_config_path": "none.yaml"}}},
            "agent.agent_loop_config_path",
            "none.yaml",
        ),
        (
            {"rollout": {"multi_turn": {"search": {"enable": True, "url": "http://h/r", "max_obs_length": 600}}}},
            "multi_turn.search.max_obs_length",
            600,
        ),
    ],
)
def test_invalid_configuration_is_refused(sections, key, value):
    with pytest.raises(InvalidConfigError) as caught:
        configured(**sections)
    paths = {
        problem.path.removeprefix("actor_rollout_ref.rollout."): problem.value for problem in caught.value.problems
    }
    assert key in paths and paths[key] == value


def test_custom_classes_are_checked_before_the_start(files):
    config = configured(rollout={"agent": {"agent_loop_config_path": str(files / "loops.yaml")}})
    check_agent_loops(config)
    (files / "loops.yaml").write_text(
        json.dumps([{"name": "mine", "_target_": f"{files}/custom.py:Yours"}]), encoding="utf-8"
    )
    with raises("config.user-code-class", "'Yours'"):
        check_agent_loops(config)
    with raises("config.unknown-name", "multi_turn.format='xml'", "hermes, llama3_json"):
        check_agent_loops(configured(rollout={"multi_turn": {"format": "xml"}}))
    tools = {"enable": True, "tool_config_path": str(files / "tools.yaml")}
    (files / "tools.yaml").write_text("tools: []", encoding="utf-8")
    with raises("tool.file-entries", "tools.yaml"):
        check_agent_loops(configured(rollout={"multi_turn": tools}))
    with raises("config.unknown-name", "agent_loop='serch_agent'", "'search_agent'"):
        check_agent_loops(configured(rollout={"agent": {"default_agent_loop": "serch_agent"}}))


def test_malformed_loop_file_is_named(files, tokenizer):
    config = configured(rollout={"agent": {"agent_loop_config_path": str(files / "loops.yaml")}})
    for content, code, value in (
        ({"name": "mine"}, "agent.loop-file-entries", {"name": "mine"}),
        ([{"name": "mine"}], "agent.loop-file-entries", "entry 0"),
        ([{"name": "mine", "_target_": "a.B"}] * 2, "agent.loop-twice", "'mine'"),
    ):
        (files / "loops.yaml").write_text(json.dumps(content), encoding="utf-8")
        with raises(code, "loops.yaml", value):
            build_agent_loops(config, tokenizer, ["mine"])


def test_loops_named_by_rows_are_checked_before_the_start(files):
    config = configured(rollout={"agent": {"agent_loop_config_path": str(files / "loops.yaml")}})

    def check(*names):
        check_agent_names(config, {name: names.index(name) for name in names}, lambda row: f"a.parquet, row {row}")

    check(None, "mine", "", "single_turn_agent")
    for name, code, value in (
        ("mein", "config.unknown-name", "path are mine"),
        ("tool_agent", "tool.no-file", "multi_turn.tool_config_path is null"),
        ("search_agent", "tool.no-retriever", "actor_rollout_ref.rollout.multi_turn.search.url is null"),
        ("external_agent", "agent.endpoint-disabled", "set actor_rollout_ref.rollout.endpoint.enable=true"),
    ):
        with raises(code, f"a.parquet, row 2: agent_name={name!r}", value):
            check(None, "mine", name, name)


def test_rows_cannot_choose_code(files):
    """A file beside downloaded data would be executed, and so would a module of any installed package."""
    (files / "evil.py").write_text(f"open({str(files / 'executed')!r}, 'w')\nclass Loop: ...\n", encoding="utf-8")
    for name in (f"{files}/evil.py:Loop", "antigravity.Loop"):
        with raises("agent.row-names-code") as caught:
            check_agent_names(configured(), {name: 7}, lambda row: f"row {row}")
        assert str(caught.value) == (
            f"row 7: agent_name={name!r} is code, which data must not choose; give the class a name in "
            "actor_rollout_ref.rollout.agent.agent_loop_config_path, or set it as "
            "actor_rollout_ref.rollout.agent.default_agent_loop [agent.row-names-code]"
        )
    assert not (files / "executed").exists() and "antigravity" not in sys.modules
    own = f"{files}/custom.py:Mine"
    check_agent_names(configured(rollout={"agent": {"default_agent_loop": own}}), {own: 0}, str)


def test_several_external_agents(files, tokenizer):
    (files / "agents.py").write_text("def first(task): ...\ndef second(task): ...\n", encoding="utf-8")
    entries = [
        {"name": name, "_target_": "external_agent", "function": f"{files}/agents.py:{name}"}
        for name in ("first", "second")
    ]
    (files / "loops.yaml").write_text(json.dumps(entries), encoding="utf-8")
    agent = {"agent_loop_config_path": str(files / "loops.yaml")}
    config = configured(rollout={"agent": agent, "endpoint": {"enable": True}})
    check_agent_names(config, {"first": 0, "second": 1}, str)
    loops = build_agent_loops(config, tokenizer, ["first", "second"])
    assert [loops[name]._agent.__name__ for name in ("first", "second")] == ["first", "second"]
    with raises("agent.endpoint-disabled", "endpoint.enable=true"):
        check_agent_loops(configured(rollout={"agent": agent}))
    (files / "loops.yaml").write_text(
        json.dumps([{**entries[0], "function": f"{files}/agents.py:third"}]), encoding="utf-8"
    )
    with raises("config.user-code-function", "'third'"):
        check_agent_loops(config)
    (files / "loops.yaml").write_text(json.dumps([{**entries[0], "funktion": "x"}]), encoding="utf-8")
    with raises("agent.loop-options", "'first'", "'funktion'"):
        check_agent_loops(config)
