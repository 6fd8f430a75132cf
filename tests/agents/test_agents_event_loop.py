"""A coroutine that blocks the event loop is reported with its stack, once, and so is the end of the blockage."""

from __future__ import annotations

import asyncio
import threading
import time

from megarl.agents.event_loop import in_image_thread, in_tokenizer_thread, monitored_loop


async def careless_tool(reported):
    reported.wait(60)  # the fault under test
    time.sleep(0.5)  # noqa: ASYNC251 - also the fault; long enough for a second report


def test_a_blocked_loop_is_reported_once_with_its_stack():
    reports: list[str] = []
    reported = threading.Event()

    def report(text):
        reports.append(text)
        reported.set()

    async def conversations():
        async with monitored_loop(report, blocked_s=0.3), asyncio.timeout(120):
            await asyncio.sleep(0.1)
            await careless_tool(reported)
            while len(reports) < 2:
                await asyncio.sleep(0.02)

    asyncio.run(conversations())
    blocked, resumed = reports
    assert "has been blocked for 0.3 s" in blocked and "in careless_tool" in blocked and "reported.wait(60)" in blocked
    assert resumed.startswith("the event loop of the conversations runs again, after")


def test_a_loop_that_waits_is_not_blocked():
    reports: list[str] = []

    async def conversations():
        async with monitored_loop(reports.append, blocked_s=0.5):
            await asyncio.sleep(1.2)

    asyncio.run(conversations())
    assert reports == []


def test_images_use_two_threads_and_delay_no_other_work():
    decoded, lock, running, most = threading.Event(), threading.Lock(), 0, 0

    def decode():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert decoded.wait(60)
        with lock:
            running -= 1

    async def requests():
        pictures = [asyncio.create_task(in_image_thread(decode)) for _ in range(64)]
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: "parsed") == "parsed"
            assert await in_tokenizer_thread(lambda: "encoded") == "encoded"
        decoded.set()
        await asyncio.gather(*pictures)

    asyncio.run(requests())
    assert most == 2
