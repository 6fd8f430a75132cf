"""HTTP servers that imitate judges and sandboxes, with configurable behaviour."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web


class Service:
    """Answers every ``POST`` with the result of a function of the request's number and body.

    The function returns JSON, or ``(status, text)``; None = no answer.
    """

    def __init__(self, answer: Callable[[int, Any], Any]) -> None:
        self.answer = answer
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        result = self.answer(len(self.bodies), self.bodies[-1])
        result = await result if isinstance(result, Awaitable) else result
        if result is None:
            await asyncio.sleep(1000)
        if isinstance(result, tuple):
            return web.Response(status=result[0], text=result[1])
        return web.json_response(result)


@contextmanager
def serving(answer: Callable[[int, Any], Any]) -> Iterator[Service]:
    """Run a service on a free port, in a thread."""
    service, ready = Service(answer), threading.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", service.handle)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            for handler in asyncio.all_tasks() - {task}:
                handler.cancel()  # hanging requests
            await runner.cleanup()

    task = loop.create_task(run())
    thread = threading.Thread(target=_until_done, args=(loop, task))
    thread.start()
    assert ready.wait(120)
    try:
        yield service
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(120)
        loop.close()


def _until_done(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
