"""Headless browser, led by playwright: opens pages offline, clicks, types, takes pictures.

Any browser of the Chromium family works: the name or path in ``BROWSER``, or the usual names on ``PATH``. Playwright's
own browsers are not used, so ``playwright install`` is not needed.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from playwright.sync_api import ConsoleMessage, Error, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
START_SECONDS, ANSWER_SECONDS = 120.0, 120.0
_ARGUMENTS = ("--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND")  # no host name resolves


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
        self._playwright = sync_playwright().start()
        try:
            self._browser = self._playwright.chromium.launch(
                executable_path=program,
                args=_ARGUMENTS,
                timeout=1000 * START_SECONDS,
                chromium_sandbox=os.geteuid() != 0,  # it refuses to start as root
            )
        except Error as error:
            self._playwright.stop()
            raise BrowserError(f"{program} does not start: {error.message}") from None
        self._page = self._browser.new_page(viewport={"width": width, "height": height})
        self._page.set_default_timeout(1000 * ANSWER_SECONDS)
        self._page.on("console", self._note_message)
        self._page.on("pageerror", lambda error: self.console.append(error.stack or error.message))
        self._page.on("request", lambda request: self._note_request(request.url))
        self._devtools = self._page.context.new_cdp_session(self._page)
        self.send("Page.enable")  # scripts of new documents need it

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._browser.close()
        self._playwright.stop()

    # ------------------------------------------------------------ pages

    def open(self, page: Path, ready: str = "true") -> None:
        """Open a file and wait until an expression is true in the page."""
        self._address = page.resolve().as_uri()
        self._page.goto(self._address)
        self.wait(ready)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, whatever its policy; promises are awaited.

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
            self._page.wait_for_timeout(30)

    # ------------------------------------------------------------ input

    def click(self, selector: str) -> None:
        """Scroll to an element and click its center."""
        self._page.mouse.click(*self._middle(selector))

    def hover(self, selector: str) -> None:
        """Move the mouse over the center of an element."""
        x, y = self._middle(selector)
        self._page.mouse.move(x - 4, y)  # a movement needs two positions
        self._page.mouse.move(x, y)

    def press(self, key: str) -> None:
        """Press a key in the focused element."""
        self._page.keyboard.press(key)

    def type(self, selector: str, text: str) -> None:
        """Replace the text of an input, as typing does."""
        self.on(selector, "(field) => { field.focus(); field.select(); }")
        self._page.keyboard.insert_text(text)

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
        try:
            return self._devtools.send(method, parameters)
        except Error as error:
            raise BrowserError(f"{method}: {error.message}") from None

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.console.append(message.text)

    def _note_request(self, address: str) -> None:
        if address.split("#")[0] not in (self._address, "about:blank"):
            self.requests.append(address)
