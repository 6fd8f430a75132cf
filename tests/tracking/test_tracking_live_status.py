import io

import pytest
from rich.console import Console as RichConsole

from megarl.tracking.live_status import LiveStatus, clock_text


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


def test_share_comes_from_reports_else_from_the_last_time(clock):
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


def test_the_innermost_phase_is_shown(clock):
    status = LiveStatus(None, clock)
    assert picture(status).strip() == ""
    status.enter("step")
    status.enter("update_actor")
    assert "update_actor" in picture(status) and "step" not in picture(status)
    status.leave()
    assert "step" in picture(status)


def test_clock_text():
    assert [clock_text(seconds) for seconds in (0, 61.4, 3725)] == ["0:00", "1:01", "1:02:05"]
