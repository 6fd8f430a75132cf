"""A tracker of one's own: tells a chat's webhook when a validation is the best so far. Needs the URL in `WEBHOOK_URL`.

python -m megarl.train --config-name quickstart_grpo 'trainer.logger=[console,examples/tracker.py:Webhook]'
"""

from __future__ import annotations

import json
import os
import urllib.request

from megarl.errors import ConfigError
from megarl.tracking import RunInfo, Tracker


class Webhook(Tracker):
    """Posts ``{"text": ...}``, as Slack, Mattermost and others take it.

    It talks to the network, so it is ``apart``: it has a process of its own, in which it may raise or hang. What
    fails is tried again, and the run goes on.
    """

    apart = True

    @classmethod
    def check(cls) -> None:
        """Before the run starts."""
        if not os.environ.get("WEBHOOK_URL", "").startswith(("http://", "https://")):
            raise ConfigError("the tracker Webhook posts to the URL in WEBHOOK_URL; set it")

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.best: dict[str, float] = {}

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Post what is better than ever; the metrics of validation begin with ``val-core/``."""
        told = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
        better = {name: value for name, value in told.items() if value > self.best.get(name, float("-inf"))}
        if better:
            numbers = ", ".join(f"{name} {value:.3f}" for name, value in better.items())
            self._post(f"{self.run.name}, step {step}: {numbers}")
            self.best.update(better)

    def _post(self, text: str) -> None:
        body = json.dumps({"text": text}).encode()
        request = urllib.request.Request(os.environ["WEBHOOK_URL"], body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=30).close()
