"""JSON nested too deeply: every reader of text from outside reports it as malformed."""

import asyncio
import json
import sys

import numpy as np
import pytest
from aiohttp import web
from prepare_data import file_entries

from megarl.agents.retrieval_client import RetrievalClient, RetrievalError, RetrievalOptions
from megarl.agents.tools.calling import hermes_calls, llama3_calls
from megarl.base.errors import DataError, MegarlError
from megarl.base.json_text import parse_json, parse_json_prefix
from megarl.data.rollout_dump import RolloutDump
from megarl.data.rows.columnar import saved_dataset_files
from megarl.data.rows.json_lines import json_source
from megarl.data.tokenization import _parse_tools
from megarl.models.hf_config import read_model_config
from megarl.ops.doctor.node.results import NodeReport
from megarl.ops.report.run_files import read_run
from megarl.rewards.calling import InfrastructureFailure
from megarl.rewards.http import post_json
from megarl.rewards.rules.code import read_cases
from megarl.tracking.jsonl_files import read_metrics

DEEP = ["[" * 100_000, '{"a":' * 100_000]
"""Python's own parser raises RecursionError, which no caller expects, for both."""


def in_file(name, content="{}"):
    """Return a function that writes a file below a folder and returns its path."""

    def write(folder, deep):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.format(deep), encoding="utf-8")
        return path

    return write


ROWS = "{}\n"


def drain(entries):
    return list(entries)


@pytest.mark.parametrize("deep", DEEP, ids=["list", "object"])
def test_parser_raises_a_value_error(deep):
    with pytest.raises(RecursionError):
        json.loads(deep)
    for parse in (parse_json, lambda text: parse_json(text.encode()), lambda text: parse_json_prefix(text, 0)):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse(deep)
    assert sys.getrecursionlimit() < 100_000
    assert parse_json(b'{"a": [1]}') == {"a": [1]} and parse_json_prefix("x [1, 2] y", 2) == ([1, 2], 8)
    with pytest.raises(ValueError, match="column 2"):
        parse_json("[")


@pytest.mark.parametrize("deep", DEEP, ids=["list", "object"])
@pytest.mark.parametrize(
    ("write", "read", "error"),
    [
        (in_file("rows.json"), lambda path: json_source(str(path), None), DataError),
        (in_file("rows.jsonl", ROWS), lambda path: json_source(str(path), None), DataError),
        (in_file("entries.jsonl", '{{"question": 1}}\n{}\n'), lambda path: drain(file_entries(path)), DataError),
        (in_file("entries.json"), lambda path: drain(file_entries(path)), DataError),
        (in_file("state.json"), lambda path: saved_dataset_files(str(path.parent)), DataError),
        (in_file("tools.txt"), lambda path: _parse_tools(path.read_text(encoding="utf-8"), "row 0"), DataError),
        (in_file("metrics.jsonl", '{}\n{{"step": 1}}\n'), read_metrics, ValueError),
        (in_file("config.json"), lambda path: read_model_config(path.parent), MegarlError),
        (in_file("report.json"), lambda path: NodeReport.from_json(path.read_text(encoding="utf-8")), ValueError),
        (in_file("truth.txt"), lambda path: read_cases(path.read_text(encoding="utf-8")), ValueError),
    ],
    ids=[
        "rows of a list",
        "rows of lines",
        "entries of lines",
        "entries of a list",
        "saved data set",
        "tools of a row",
        "metrics",
        "model",
        "doctor",
        "ground truth",
    ],
)
def test_readers_of_files_name_the_malformed_file(tmp_path, write, read, error, deep):
    with pytest.raises(error):
        read(write(tmp_path, deep))


@pytest.mark.parametrize("deep", DEEP, ids=["list", "object"])
def test_a_nested_tool_call_is_malformed(deep):
    arguments = json.dumps({"name": "search", "arguments": deep})
    for text in (f"<tool_call>{deep}</tool_call>", f"<tool_call>{arguments}</tool_call>"):
        (call,) = hermes_calls(text)
        assert call.problem is not None and "nested too deeply" in call.problem
    (call,) = llama3_calls(f"<|python_tag|>{deep}")
    assert call.problem is not None and "nested too deeply" in call.problem


@pytest.mark.parametrize("deep", DEEP, ids=["list", "object"])
def test_a_nested_answer_of_a_service_is_a_failure_of_the_service(deep):
    async def answer(request):
        return web.Response(text=deep)

    async def ask():
        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/retrieve"
        try:
            with pytest.raises(InfrastructureFailure, match="answered no JSON"):
                await post_json(url, {}, timeout_s=60)
            with pytest.raises(RetrievalError, match="is not JSON"):
                await RetrievalClient(RetrievalOptions(url, retries=0)).retrieve(["query"])
        finally:
            await runner.cleanup()

    asyncio.run(ask())


@pytest.mark.parametrize("deep", DEEP, ids=["list", "object"])
def test_files_of_a_run_are_reported(tmp_path, deep):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    (tmp_path / "run.json").write_text(deep, encoding="utf-8")
    assert any("run.json cannot be read" in problem for problem in read_run(tmp_path).problems)


@pytest.mark.parametrize("deep", DEEP, ids=["list", "object"])
def test_metadata_of_a_rollout_dump_is_checked(tmp_path, deep):
    np.savez(tmp_path / "1.npz", facts=np.array(deep))
    with pytest.raises(DataError, match=r"1\.npz"):
        RolloutDump.load(tmp_path / "1.npz")
