"""Headless browser, controlled by the DevTools protocol: opens pages offline, clicks, types, takes pictures.

Any browser of the Chromium family works: the name or path in ``BROWSER``, or the usual names on ``PATH``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
START_SECONDS, ANSWER_SECONDS = 120.0, 120.0
_ARGUMENTS = (
    "--headless=new", "--remote-debugging-port=0", "--no-first-run", "--no-default-browser-check", "--disable-gpu",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no host name resolves
)  # fmt: skip
_KEYS = {
    "Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowLeft": (37, ""), "ArrowRight": (39, ""),
    "/": (191, "/"), " ": (32, " "),
}  # fmt: skip


class BrowserError(RuntimeError):
    """No browser, a browser that does not start, or a failed command."""


def find_browser() -> str | None:
    """Return the path of a supported browser, or None.

    Raises:
        BrowserError: ``BROWSER`` names a program that does not exist.
    """
    name = os.environ.get("BROWSER")
    if name:
        path = shutil.which(name)
        if path is None:
            raise BrowserError(f"BROWSER={name}: no such program")
        return path
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one tab; a context manager.

    Attributes:
        console: console warnings and errors, and uncaught exceptions, of all pages.
        requests: addresses that pages requested, other than their own.

    Args:
        program: path of the browser.
        width: width of the window, in CSS pixels.
        height: height of the window, in CSS pixels.
    """

    def __init__(self, program: str, width: int = 1280, height: int = 900) -> None:
        self.console: list[str] = []
        self.requests: list[str] = []
        self._address = ""
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self._profile = tempfile.TemporaryDirectory(prefix="megarl-browser-", ignore_cleanup_errors=True)
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses to start as root
        size = f"--window-size={width},{height}"
        command = [program, *_ARGUMENTS, *root, size, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self._run(self._connect())
        except BaseException:
            self.close()
            raise
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        if hasattr(self, "_session"):
            self._run(self._session.close())
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._loop.close()
        self._profile.cleanup()

    # ------------------------------------------------------------ pages

    def open(self, page: Path, ready: str = "true") -> None:
        """Open a file and wait until an expression is true in the page."""
        self._address = page.resolve().as_uri()
        self.send("Page.navigate", url=self._address)
        self.wait(f"location.href === {json.dumps(self._address)} && document.readyState === 'complete' && ({ready})")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; promises are awaited.

        Raises:
            BrowserError: the expression throws.
        """
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(f"{expression}: {details.get('exception', {}).get('description', details['text'])}")
        return answer["result"].get("value")

    def on(self, selector: str, function: str, *values: Any) -> Any:
        """Return the result of a JavaScript function of an element and values.

        Raises:
            BrowserError: the element does not exist, or the function throws.
        """
        if not self.evaluate(f"Boolean(document.querySelector({json.dumps(selector)}))"):
            raise BrowserError(f"no element {selector}")
        arguments = ", ".join(map(json.dumps, values))
        return self.evaluate(f"({function})(document.querySelector({json.dumps(selector)}), {arguments})")

    def wait(self, expression: str, seconds: float = ANSWER_SECONDS) -> None:
        """Wait until an expression is true.

        Raises:
            BrowserError: the time is over.
        """
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise BrowserError(f"not true within {seconds:g} s: {expression}; console: {self.console}")
            time.sleep(0.03)

    # ------------------------------------------------------------ input

    def click(self, selector: str) -> None:
        """Scroll to an element and click its center."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Move the mouse over the center of an element."""
        x, y = self._middle(selector)
        for before in (4, 0):  # a movement needs two positions
            self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x - before, y=y)

    def press(self, key: str) -> None:
        """Press a key in the focused element."""
        code, text = _KEYS[key]
        fields = {"key": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **fields)

    def type(self, selector: str, text: str) -> None:
        """Replace the text of an input, as typing does."""
        self.on(selector, "(field) => { field.focus(); field.select(); }")
        self.send("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Set a select, a checkbox or a slider, with the same events as user input."""
        self.on(
            selector,
            """(field, value) => {
                if (field.type === "checkbox") field.checked = value === "true";
                else field.value = value;
                for (const kind of ["input", "change"]) field.dispatchEvent(new Event(kind, { bubbles: true }));
            }""",
            value,
        )

    def _middle(self, selector: str) -> tuple[float, float]:
        x, y = self.on(
            selector,
            """async (found) => {
                found.scrollIntoView({ block: "center", behavior: "instant" });
                // mouse events apply to the last frame
                for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
                const box = found.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }""",
        )
        return x, y

    # ------------------------------------------------------------ display

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Set the size of the page in CSS pixels, and the number of device pixels per CSS pixel."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def prefer(self, scheme: str, media: str = "") -> None:
        """Emulate a ``light`` or ``dark`` system, and a media type."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)

    def picture(self, path: Path, selector: str | None = None, height: int | None = None) -> None:
        """Save the window, or an element down to ``height``, as PNG."""
        clip = {}
        if selector is not None:
            box = self.on(
                selector,
                """(found) => {
                    const box = found.getBoundingClientRect();
                    return [box.x + scrollX, box.y + scrollY, box.width, box.height];
                }""",
            )
            size = min(box[3], height or box[3])
            clip = {"clip": {"x": box[0], "y": box[1], "width": box[2], "height": size, "scale": 1}}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=bool(clip), **clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def printed(self) -> bytes:
        """Return the page as PDF."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])

    # ------------------------------------------------------------ protocol

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result.

        Raises:
            BrowserError: the browser rejects the command, has ended, or does not answer.
        """
        return self._run(self._send(method, parameters))

    def _run(self, task: Any) -> Any:
        return self._loop.run_until_complete(task)

    async def _connect(self) -> None:
        address = await self._devtools()
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://{address}/json/list") as answer:
            tab = next(entry for entry in await answer.json() if entry["type"] == "page")
        self._socket = await self._session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._send(f"{domain}.enable", {})

    async def _devtools(self) -> str:
        """Return host and port, which the browser writes to its profile."""
        file, end = Path(self._profile.name) / "DevToolsActivePort", time.monotonic() + START_SECONDS
        while not (file.exists() and "\n" in file.read_text(encoding="utf-8")):
            if self._process.poll() is not None or time.monotonic() > end:
                raise BrowserError(f"{self._process.args[0]} does not start (exit code {self._process.poll()})")
            await asyncio.sleep(0.05)
        return f"127.0.0.1:{file.read_text(encoding='utf-8').splitlines()[0]}"

    async def _send(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        number = self._number
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive(timeout=ANSWER_SECONDS)
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise BrowserError(f"the browser is gone: {message.type.name}")
            answer = json.loads(message.data)
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if "method" in answer:
                self._note(answer["method"], answer["params"])

    def _note(self, event: str, event_data: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = event_data["exceptionDetails"]
            self.console.append(str(details.get("exception", {}).get("description", details["text"])))
        elif event == "Runtime.consoleAPICalled" and event_data["type"] in ("error", "warning", "assert"):
            self.console.append(
                " ".join(str(value.get("value", value.get("description"))) for value in event_data["args"])
            )
        elif event == "Log.entryAdded" and event_data["entry"]["level"] in ("error", "warning"):
            self.console.append(event_data["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            address = event_data["request"]["url"]
            if address.split("#")[0] not in (self._address, "about:blank"):
                self.requests.append(address)
