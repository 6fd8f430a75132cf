"""The timeline file, and clock offsets."""

import gzip
import json

from hypothesis import given
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.ops.timeline.command import main
from megarl.tracing import Event
from megarl.tracing.trace_file import ClockReading, TraceFile, estimate_offset, read_trace

MS = 1_000_000


def write_two_processes(path):
    """The driver's, and one whose clock is 5 ms ahead."""
    file = TraceFile(path, origin_ns=10 * MS)
    file.name_process(0, "driver")
    file.name_process(1, "actor rank 0", "node-1, pid 7")
    file.write(
        0, [Event("X", "gen", "phase", 11 * MS, 2 * MS, "", {}), Event("C", "busy", "", 12 * MS, 0, "", {"n": 3})]
    )
    file.write(1, [Event("X", "exchange", "verb", 17 * MS, MS, "io", {"arg0": 4})], offset_ns=5 * MS)
    return file


def test_complete_file_is_json_in_microseconds_on_one_clock(tmp_path):
    with write_two_processes(tmp_path / "trace.json") as file:
        file.flush()
    events = {event["name"]: event for event in json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))}
    assert (events["gen"]["ts"], events["gen"]["dur"], events["gen"]["pid"]) == (1000, 2000, 0)
    assert (events["busy"]["ph"], events["busy"]["ts"], events["busy"]["args"]) == ("C", 2000, {"n": 3})
    exchange = events["exchange"]
    assert (exchange["ts"], exchange["pid"], exchange["args"]) == (2000, 1, {"arg0": 4}), "12 ms on the driver's clock"
    assert events["thread_name"]["args"] == {"name": "io"} and events["thread_name"]["tid"] == exchange["tid"]
    assert events["process_labels"]["args"] == {"labels": "node-1, pid 7"}


def test_file_of_a_killed_run_is_readable(tmp_path):
    path = tmp_path / "run" / "timeline" / "trace.json"
    file = write_two_processes(path)
    file.flush()
    whole = path.read_text(encoding="utf-8")
    assert [event["name"] for event in read_trace(path)][-1] == "exchange"
    path.write_text(whole[:-20], encoding="utf-8")
    names = [event["name"] for event in read_trace(tmp_path / "run")]
    assert "gen" in names and "exchange" not in names
    file.close()


def test_other_files_are_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"a": 1}', encoding="utf-8")
    with raises("timeline.not-a-timeline", tmp_path / "other.json"):
        read_trace(tmp_path / "other.json")
    with raises("timeline.not-recorded") as caught:
        read_trace(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has no timeline: trainer.timeline.enable=true writes it to timeline/trace.json "
        "[timeline.not-recorded]"
    )
    with raises("timeline.no-such-path", tmp_path / "nowhere"):
        read_trace(tmp_path / "nowhere")


def test_command_prints_and_compresses_a_timeline(tmp_path, capsys):
    write_two_processes(tmp_path / "trace.json").close()
    assert main([str(tmp_path), "--out", str(tmp_path / "new" / "all.json.gz")]) == 0
    output = capsys.readouterr().out
    assert "1 processes" in output and "actor rank 0" in output and "gen" in output
    packed = json.loads(gzip.decompress((tmp_path / "new" / "all.json.gz").read_bytes()))
    assert packed == read_trace(tmp_path / "new" / "all.json.gz") == read_trace(tmp_path)
    assert main([str(tmp_path / "nowhere")]) == 2


def test_fastest_clock_reading_wins():
    slow, fast = ClockReading(0, 5_900, 1_000), ClockReading(2_000, 7_110, 2_200)
    assert estimate_offset([slow, fast]) == (7_110 - 2_100, 100)


@given(
    ahead=st.integers(-(10**15), 10**15),
    delays=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=8),
)
def test_true_clock_offset_is_within_the_error(ahead, delays):
    readings, now = [], 0
    for request_ns, reply_ns in delays:
        readings.append(ClockReading(now, now + request_ns + ahead, now + request_ns + reply_ns))
        now += request_ns + reply_ns + 1
    offset = estimate_offset(readings)
    assert abs(offset.ahead_ns - ahead) <= offset.error_ns + 1
