"""A custom tracker: posts the best validation metrics so far to a chat webhook, `WEBHOOK_URL`.

megarl train --config-name quickstart_grpo 'trainer.logger=[console,examples/tracker.py:Webhook]'
"""

from __future__ import annotations

import json
import os
import urllib.request

from megarl.base.errors import ConfigError
from megarl.tracking import RunInfo, Tracker


class Webhook(Tracker):
    """Posts ``{"text": ...}``, the format of Slack and Mattermost.

    It uses the network, so it runs in a subprocess, where it may raise or hang. Failed posts are retried, and the run
    continues.
    """

    in_subprocess = True

    @classmethod
    def check(cls) -> None:
        """Check the environment before the run starts."""
        if not os.environ.get("WEBHOOK_URL", "").startswith(("http://", "https://")):
            raise ConfigError("set WEBHOOK_URL to the URL that the tracker posts to", code="tracking.webhook-url")

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.best: dict[str, float] = {}

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Post the validation metrics (``val-core/...``) that are the best so far."""
        validation = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
        better = {name: value for name, value in validation.items() if value > self.best.get(name, float("-inf"))}
        if better:
            numbers = ", ".join(f"{name} {value:.3f}" for name, value in better.items())
            self._post(f"{self.run.name}, step {step}: {numbers}")
            self.best.update(better)

    def _post(self, text: str) -> None:
        body = json.dumps({"text": text}).encode()
        request = urllib.request.Request(os.environ["WEBHOOK_URL"], body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=30).close()
