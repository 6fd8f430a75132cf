"""A bench records each check, and a second run repeats only checks that did not pass."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.expected_errors import raises

from megarl.ops.acceptance import command
from megarl.ops.acceptance.bench import Bench, MissingError, near_plan, within
from megarl.ops.acceptance.engines import first_gap
from megarl.ops.acceptance.models import FAMILIES
from megarl.ops.acceptance.parity import _Case, _error
from megarl.ops.acceptance.results import Result, StageReport, Verdict, markdown, read_report, result_lines

PASSED = Result("", Verdict.OK, 1.0, "s")


def bench_of(folder):
    return Bench(read_report(folder, "sample", "tiny"), folder, "cpu", lambda result: None)


def fail():
    raise RuntimeError("out of\n memory")


def lack():
    raise MissingError("ray is not installed")


def test_exception_is_a_failed_check_and_missing_package_a_row(tmp_path):
    bench = bench_of(tmp_path)
    bench.check("works", lambda: PASSED)
    bench.check("fails", fail)
    bench.check("lacks", lack)
    bench.finish()
    stored = json.loads((tmp_path / "sample.json").read_text(encoding="utf-8"))
    assert [(row["check"], row["outcome"], row["note"]) for row in stored["results"]] == [
        ("works", "ok", ""),
        ("fails", "FAIL", "RuntimeError: out of memory"),
        ("lacks", "missing", "ray is not installed"),
    ]
    assert stored["is_complete"] and stored["facts"]["torch"] == torch.__version__


def test_second_run_repeats_only_checks_that_did_not_pass(tmp_path):
    bench = bench_of(tmp_path)
    bench.check("works", lambda: PASSED)
    bench.check("fails", fail)
    resumed, calls = bench_of(tmp_path), []
    for name in ("works", "fails", "new"):
        resumed.check(name, lambda n=name: calls.append(n) or PASSED)
    assert calls == ["fails", "new"]
    assert [result.outcome for result in resumed.report.results] == [Verdict.OK] * 3


def test_report_of_another_scale_is_not_reused(tmp_path):
    bench = bench_of(tmp_path)
    bench.check("works", lambda: PASSED)
    assert read_report(tmp_path, "sample", "full").results == ()


def test_damaged_report_is_named(tmp_path):
    (tmp_path / "sample.json").write_text('{"stage": "sample"}', encoding="utf-8")
    with raises("acceptance.not-a-report", tmp_path / "sample.json"):
        read_report(tmp_path, "sample", "tiny")


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (within(1e-6, 1e-5), Verdict.OK),
        (within(2e-5, 1e-5), Verdict.FAIL),
        (within(float("nan"), 1e-5), Verdict.FAIL),
        (near_plan(11.0, 10.0, "GB", 0.15), Verdict.OK),
        (near_plan(8.0, 10.0, "GB", 0.15), Verdict.BELOW),
    ],
)
def test_limits(result, outcome):
    assert result.outcome is outcome


def test_speed_below_its_target_is_no_failure(tmp_path):
    full = Bench(StageReport("sample", "full"), tmp_path, "cpu", lambda result: None)
    assert full.speed(40.0, 48.0, "% MFU").outcome is Verdict.BELOW
    assert full.speed(49.0, 48.0, "% MFU").outcome is Verdict.OK
    assert bench_of(tmp_path).speed(1.0, 48.0, "% MFU").outcome is Verdict.INFO


def test_tables_have_a_row_per_check():
    report = StageReport("sample", "full", (Result("a | b", Verdict.OK, 1234.5, "tokens/s", "at least 1e+03"),))
    assert result_lines(report)[0] == "== sample: 1 check: 1 ok, 0.0 s, not finished"
    assert result_lines(report)[1].split("  ") == ["ok", "a | b", "1,234 tokens/s", "at least 1e+03"]
    assert "| a / b | ok | 1,234 tokens/s | at least 1e+03 |  |" in markdown([report])


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA L40S", None),
    ],
)
def test_peak_is_known_for_the_cards_of_the_hardware_files_only(tmp_path, monkeypatch, name, hardware):
    bench = Bench(StageReport("sample", "full"), tmp_path, "cpu", lambda result: None)
    monkeypatch.setattr(bench, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name=name))
    assert (bench.hardware and bench.hardware.name) == hardware
    assert (bench.peak_flops is None) == (hardware is None)
    assert bench.speed(1.0, bench.peak_flops, "FLOP/s").outcome is (Verdict.INFO if hardware is None else Verdict.BELOW)


@pytest.mark.parametrize(
    ("left", "waiting", "expected"),
    [
        (None, ["parity", "jobs", "speed"], 480),
        (200, ["parity", "jobs", "speed", "sync"], 170),
        (100, ["parity", "jobs", "speed", "sync"], 100),
        (590, ["parity", "jobs", "speed", "sync"], 340),
        (1000, ["speed"], 480),
    ],
)
def test_budget_gives_each_group_its_share(left, waiting, expected):
    """Estimates: parity beside jobs 170 s, speed 80 s, sync 45 s; a budget twice as large doubles each."""
    group = waiting[:2] if "jobs" in waiting else waiting[:1]
    assert command._limit(group, waiting, 480.0, left) == pytest.approx(expected)


def test_near_tie_is_the_gap_of_the_logits_where_answers_part():
    """A model whose logits are a row by the last token: after token 1 the words 2 and 3 are 0.25 apart."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = torch.nn.Parameter(torch.tensor([[0.0] * 4, [0.0, 1.0, 2.0, 2.25], [0.0] * 4, [0.0] * 4]))

        def forward(self, ids):
            return mock.Mock(logits=self.rows[ids])

    assert first_gap(Model(), [0], [1, 2, 0], [1, 3, 3]) == pytest.approx(0.25)
    assert first_gap(Model(), [0, 1], [2], [3]) == pytest.approx(0.25)


def test_error_of_one_rerouted_token_does_not_decide():
    ours, theirs = torch.tensor([0.0, 0.1, 5.0]), torch.zeros(3)
    assert _error(ours, theirs, typical=True) == pytest.approx(0.1)
    assert _error(ours, theirs, typical=False) == 5.0
    reroutes = {family: _Case(family, mock.Mock())._reroutes(torch.bfloat16) for family in FAMILIES}
    dense = {"qwen2", "qwen3", "llama", "mistral", "olmo2", "olmo3", "gemma3_text"}
    assert {family for family, is_rerouted in reroutes.items() if not is_rerouted} == dense
    assert not _Case("qwen3_moe", mock.Mock())._reroutes(torch.float32)
