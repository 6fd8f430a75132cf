import io

import psutil
import pytest
from rich.console import Console as RichConsole

from megarl.base.processes import descendants
from megarl.tracking import RL_COLUMNS
from megarl.tracking.live_status import LiveStatus


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def picture(status):
    text = io.StringIO()
    RichConsole(file=text, width=100).print(status)
    return text.getvalue()


def test_progress_is_reported_or_estimated_from_last_duration(clock):
    status = LiveStatus(10, clock)
    first = status.enter("gen")
    clock.now = 4.0
    assert first.share is None
    status.leave()
    second = status.enter("gen")
    clock.now = 7.0
    assert second.share == pytest.approx(0.75) and second.remark == "3.0 of about 4.0 s"
    clock.now = 99.0
    assert second.share == 0.99, "longer than usual is never done"
    second.update(16, 64)
    assert second.share == 0.25 and second.remark == "16/64  95.0 s"
    second.update(0, 0)
    assert second.share == 1.0


def test_time_left_follows_the_pace_of_this_process(clock):
    status = LiveStatus(30, clock)
    assert status.seconds_left() is None
    clock.now, status.steps_done = 100.0, 21  # resumed: the first row is that of step 21
    assert status.seconds_left() is None
    clock.now = 106.0
    status.steps_done = 23
    assert status.seconds_left() == pytest.approx(21.0)
    assert "step 23/30" in picture(status) and "0:21 left" in picture(status)


def test_innermost_phase_is_shown(clock):
    status = LiveStatus(None, clock)
    assert picture(status).strip() == ""
    status.enter("step")
    status.enter("update_actor")
    assert "update_actor" in picture(status) and "step" not in picture(status)
    status.leave()
    assert "step" in picture(status)


RL_STEP = {
    "critic/score/mean": 0.5, "actor/kl_loss": 0.0123, "actor/entropy": 0.32, "response_length/mean": 812.0,
    "perf/total_num_tokens": 1e6, "timing_s/step": 33.0, "perf/max_memory_allocated_gb": 67.3,
}  # fmt: skip


def view(clock, width, height=30, encoding="utf-8", metrics=RL_STEP):
    """Lines of the view of a long run with a long name, in a terminal of a size."""

    class Screen(io.StringIO):
        pass

    Screen.encoding = encoding
    status = LiveStatus(4000, clock, RL_COLUMNS, "a-very-long-experiment-name-" * 5)
    status.steps_done = 1
    for _ in range(5):
        status.note(metrics)
    clock.now += 600000.0
    status.steps_done = 1234
    status.enter("update_actor")
    text = Screen()
    RichConsole(file=text, width=width, height=height, force_terminal=True, color_system=None).print(status)
    return text.getvalue().splitlines()


def test_view_has_phase_figures_memory_and_time_left(clock):
    lines = view(clock, 110)
    assert "step 1234/4000" in lines[1] and "31 %" in lines[1] and "15 days 13 h left" in lines[1]
    assert "update_actor" in lines[2]
    assert [" ".join(part.split()[:2]) for part in lines[3].strip("│ ").split("   ")] == [
        "reward 0.500", "KL 0.0123", "entropy 0.320", "len 812.0", "tok/s 30.3k", "device memory",
    ]  # fmt: skip
    assert lines[3].rstrip("│ ").endswith("device memory 67.3 GiB") and "▁" in lines[3]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(("width", "height"), [(110, 40), (80, 24), (60, 20), (40, 20), (20, 8), (80, 5), (200, 50)])
def test_view_fits_every_terminal(clock, width, height, encoding):
    lines = view(clock, width, height, encoding)
    assert len(lines) <= (2 if height < 12 else 5) and max(map(len, lines)) <= min(width, 110)
    "\n".join(lines).encode(encoding)
    if width >= 80 and height > 12:
        assert all(name in lines[3] for name in ("reward 0.500", "KL 0.0123", "tok/s 30.3k", "67.3 GiB"))


def test_memory_is_host_memory_without_a_device(clock):
    lines = view(clock, 110, metrics={"critic/score/mean": 0.5})
    shown = float(lines[3].partition("host memory ")[2].split()[0])
    me = psutil.Process()
    held = sum(process.memory_info().rss for process in (me, *descendants()))
    assert shown == pytest.approx(held / 2**30, abs=0.3)


def test_height_is_constant_between_phases(clock):
    status = LiveStatus(10, clock)
    lines = picture(status).count("\n")
    status.enter("gen")
    assert picture(status).count("\n") == lines
