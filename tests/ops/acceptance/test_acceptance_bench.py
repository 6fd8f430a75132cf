"""A bench records each check, and a second run repeats only checks that did not pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megarl.base.errors import DataError
from megarl.ops.acceptance.bench import Bench, MissingError, near_plan, within
from megarl.ops.acceptance.results import Result, StageReport, Verdict, markdown, read_report, result_lines

PASSED = Result("", Verdict.OK, 1.0, "s")


def bench_of(folder: Path) -> Bench:
    return Bench(read_report(folder, "sample", "tiny"), folder, "cpu", lambda result: None)


def fail() -> Result:
    raise RuntimeError("out of\n memory")


def lack() -> Result:
    raise MissingError("ray is not installed")


def test_exception_is_a_failed_check_and_missing_package_a_row(tmp_path: Path) -> None:
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


def test_second_run_repeats_only_checks_that_did_not_pass(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    bench.check("works", lambda: PASSED)
    bench.check("fails", fail)
    resumed, calls = bench_of(tmp_path), []
    for name in ("works", "fails", "new"):
        resumed.check(name, lambda n=name: calls.append(n) or PASSED)
    assert calls == ["fails", "new"]
    assert [result.outcome for result in resumed.report.results] == [Verdict.OK] * 3


def test_report_of_another_scale_is_not_reused(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    bench.check("works", lambda: PASSED)
    assert read_report(tmp_path, "sample", "full").results == ()


def test_damaged_report_is_named(tmp_path: Path) -> None:
    (tmp_path / "sample.json").write_text('{"stage": "sample"}', encoding="utf-8")
    with pytest.raises(DataError, match=r"sample\.json is not a report .* remove it"):
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
def test_limits(result: Result, outcome: Verdict) -> None:
    assert result.outcome is outcome


def test_speed_below_its_target_is_no_failure(tmp_path: Path) -> None:
    full = Bench(StageReport("sample", "full"), tmp_path, "cpu", lambda result: None)
    assert full.speed(40.0, 48.0, "% MFU").outcome is Verdict.BELOW
    assert full.speed(49.0, 48.0, "% MFU").outcome is Verdict.OK
    assert bench_of(tmp_path).speed(1.0, 48.0, "% MFU").outcome is Verdict.INFO


def test_tables_have_a_row_per_check() -> None:
    report = StageReport("sample", "full", (Result("a | b", Verdict.OK, 1234.5, "tokens/s", "at least 1e+03"),))
    assert result_lines(report)[0] == "== sample: 1 check: 1 ok, 0.0 s, not finished"
    assert result_lines(report)[1].split("  ") == ["ok", "a | b", "1,234 tokens/s", "at least 1e+03"]
    assert "| a / b | ok | 1,234 tokens/s | at least 1e+03 |  |" in markdown([report])
