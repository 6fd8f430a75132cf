from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.tracing import Event
from megarl.tracing.command import main
from megarl.tracing.trace_file import TraceFile, read_trace

MS = 1_000_000


def write_two_processes(path: Path) -> TraceFile:
    """The driver's, and one whose clock is 5 ms ahead."""
    file = TraceFile(path, origin_ns=10 * MS)
    file.name_process(0, "driver")
    file.name_process(1, "actor rank 0", "node-1, pid 7")
    file.write(
        0, [Event("X", "gen", "phase", 11 * MS, 2 * MS, "", {}), Event("C", "busy", "", 12 * MS, 0, "", {"n": 3})]
    )
    file.write(1, [Event("X", "exchange", "verb", 17 * MS, MS, "io", {"arg0": 4})], offset_ns=5 * MS)
    return file


def test_a_complete_file_is_json_with_times_in_microseconds_on_one_clock(tmp_path: Path) -> None:
    with write_two_processes(tmp_path / "trace.json") as file:
        file.flush()
    events = {event["name"]: event for event in json.loads((tmp_path / "trace.json").read_text())}
    assert (events["gen"]["ts"], events["gen"]["dur"], events["gen"]["pid"]) == (1000, 2000, 0)
    assert (events["busy"]["ph"], events["busy"]["ts"], events["busy"]["args"]) == ("C", 2000, {"n": 3})
    exchange = events["exchange"]
    assert (exchange["ts"], exchange["pid"], exchange["args"]) == (2000, 1, {"arg0": 4}), "12 ms on the driver's clock"
    assert events["thread_name"]["args"] == {"name": "io"} and events["thread_name"]["tid"] == exchange["tid"]
    assert events["process_labels"]["args"] == {"labels": "node-1, pid 7"}


def test_a_file_whose_run_was_killed_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "run" / "timeline" / "trace.json"
    file = write_two_processes(path)
    file.flush()
    whole = path.read_text()
    assert [event["name"] for event in read_trace(path)][-1] == "exchange"
    path.write_text(whole[:-20])
    names = [event["name"] for event in read_trace(tmp_path / "run")]
    assert "gen" in names and "exchange" not in names
    file.close()


def test_what_is_no_timeline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="is not a timeline"):
        read_trace(tmp_path / "other.json")
    with pytest.raises(ConfigError, match=r"has no timeline: trainer\.timeline\.enable=true"):
        read_trace(tmp_path)
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        read_trace(tmp_path / "nowhere")


def test_the_command_tells_a_timeline_and_packs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_two_processes(tmp_path / "trace.json").close()
    assert main([str(tmp_path), "--out", str(tmp_path / "new" / "all.json.gz")]) == 0
    told = capsys.readouterr().out
    assert "1 processes" in told and "actor rank 0" in told and "gen" in told
    packed = json.loads(gzip.decompress((tmp_path / "new" / "all.json.gz").read_bytes()))
    assert packed == read_trace(tmp_path / "new" / "all.json.gz") == read_trace(tmp_path)
    assert main([str(tmp_path / "nowhere")]) == 2
