"""Attempts one after the other, until the job is done or nothing more is to be hoped for."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from megarl.cli import EXIT_BAD_CONFIG, EXIT_INTERRUPTED, EXIT_RUN_FAILED
from megarl.errors import ResourceError
from megarl.launch.attempt import ASKED, Attempt, Interrupted, NodeLost
from megarl.launch.protocol import Event
from megarl.launch.settings import ClusterSettings, JobToRun

LONGEST_DELAY_S = 300.0


class Launcher:
    """Runs a job on a cluster, again and again where it fails.

    Args:
        settings: of the cluster; hosts beyond those that the job needs are spares.
        job: what is run.
        reach: the command that starts an agent on a host.
        max_restarts: attempts after the first.
        delay_s: seconds before the first restart; they double with each, up to :data:`LONGEST_DELAY_S`.
        say: prints a line for the user.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        job: JobToRun,
        reach: Callable[[str], Sequence[str]],
        max_restarts: int,
        delay_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.settings, self.job, self.reach = settings, job, reach
        self.max_restarts, self.delay_s, self.say = max_restarts, delay_s, say
        self._hosts = list(settings.hosts)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._asked: int | None = None

    def run(self) -> int:
        """Run the job to its end.

        Returns:
            The driver's exit code; 1 where there was no driver; 128 + n where signal n ended the launcher before it.
        """
        with self._signals_noted():
            for number in range(1, self.max_restarts + 2):
                try:
                    code, why, final = self._attempt(number)
                    if final or number > self.max_restarts:
                        if why:
                            self.say(f"{why.rstrip('.')}. {self._verdict(code, final)}")
                        return code
                    self._pause(number, why)
                except Interrupted as asked:
                    return asked.code if asked.code is not None else 128 + asked.number
        raise AssertionError("the last attempt is final")

    def _attempt(self, number: int) -> tuple[int, str, bool]:
        """Exit code, why the attempt failed (empty: it did not), and whether it should be the last."""
        hosts, folder = tuple(self._hosts[: self.job.nodes]), self.settings.log_folder
        settings = replace(self.settings, hosts=hosts, log_folder=folder and f"{folder}/attempt_{number}")
        self._events, ran = queue.SimpleQueue(), False
        if self._asked is not None:  # by a signal that the previous attempt did not see any more
            raise Interrupted(self._asked)
        try:
            with Attempt(settings, self.job, self.reach, self._events, self.say) as attempt:
                attempt.start()
                if settings.doctor:
                    attempt.check()
                ran = True
                code = attempt.run()
        except NodeLost as error:
            self._hosts.remove(error.host)
            self._hosts.append(error.host)  # a spare, if there is one, takes its place
            return EXIT_RUN_FAILED, str(error), number == 1 and not ran
        except ResourceError as error:
            # What never worked is for the user to correct; what did before may work again, as when a node comes back.
            return EXIT_RUN_FAILED, str(error), number == 1
        wrong = code == EXIT_BAD_CONFIG and self.job.is_megarl
        return code, f"the driver ended with code {code}" if code else "", wrong or code in (0, EXIT_INTERRUPTED)

    def _verdict(self, code: int, final: bool) -> str:
        if final and code == EXIT_BAD_CONFIG:
            return "A wrong configuration stays wrong: no restart"
        if final and code == EXIT_INTERRUPTED:
            return "It was interrupted: no restart"
        if final:
            return "Nothing has run yet: no restart"
        return f"No restart is left of {self.max_restarts}" if self.max_restarts else "--max-restarts=N would try again"

    def _pause(self, number: int, why: str) -> None:
        """Wait before another attempt.

        Raises:
            Interrupted: by a signal.
        """
        delay = min(LONGEST_DELAY_S, self.delay_s * 2 ** (number - 1))
        why = why.rstrip(".")
        self.say(f"{why}. Restart {number} of {self.max_restarts} in {delay:g} s, from the newest checkpoint")
        deadline = time.monotonic() + delay
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                return
            if event.kind == ASKED:
                raise Interrupted(event.facts["number"])

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """Signals become events: they are acted on where the launcher waits, never in the middle of something."""

        def note(number: int, frame: FrameType | None) -> None:
            self._asked = number
            self._events.put(Event(ASKED, facts={"number": number}))

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
