"""A coroutine that blocks the event loop is reported with its stack, once, and so is the end of the blockage."""

from __future__ import annotations

import asyncio
import time

from megarl.agents.event_loop import monitored_loop


async def careless_tool(seconds: float) -> None:
    time.sleep(seconds)  # the fault under test


def test_a_blocked_loop_is_reported_once_with_its_stack() -> None:
    reports: list[str] = []

    async def conversations() -> None:
        async with monitored_loop(reports.append, blocked_s=0.2):
            await asyncio.sleep(0.1)
            await careless_tool(0.8)
            await asyncio.sleep(0.3)

    asyncio.run(conversations())
    blocked, resumed = reports
    assert (
        "has been blocked for 0.2 s" in blocked and "in careless_tool" in blocked and "time.sleep(seconds)" in blocked
    )
    assert resumed.startswith("the event loop of the conversations runs again, after")


def test_a_loop_that_waits_is_not_blocked() -> None:
    reports: list[str] = []

    async def conversations() -> None:
        async with monitored_loop(reports.append, blocked_s=0.5):
            await asyncio.sleep(1.2)

    asyncio.run(conversations())
    assert reports == []
