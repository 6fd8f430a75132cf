"""Draw the terminal of a run: ``python tools/draw_terminal.py RUN_FOLDER OUT.svg STEP GIB``.

STEP is the last finished step; GIB is the memory shown in the live view, which no file records.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console as RichConsole
from rich.terminal_theme import MONOKAI

from megarl.tracking import RL_COLUMNS, Console, read_metrics
from megarl.tracking.live_status import LiveStatus

_WEB_FONT = re.compile(r"@font-face \{.*?\}", re.S)  # documentation pages load nothing from the network
WIDTH, ROWS_SHOWN = 110, 12


def draw(folder: Path, target: Path, last_shown: int, gibibytes: float) -> None:
    """Write the picture of the screen during the update after step ``last_shown``."""
    rows = read_metrics(folder / "metrics.jsonl")
    last = int(rows[-1]["step"])
    output = RichConsole(file=io.StringIO(), record=True, width=WIDTH, height=40, force_terminal=True, highlight=False)
    console = Console(last, output=output)
    clock = 0.0
    status = LiveStatus(last, lambda: clock, RL_COLUMNS, folder.parent.name)
    for row in rows[: last_shown + 1]:
        clock += row.get("timing_s/step", 0.0)
        if row["step"]:
            status.steps_done = int(row["step"])
            status.note(row)
        if row["step"] > last_shown - ROWS_SHOWN or row["step"] == 0:
            console.log({name: value for name, value in row.items() if name != "step"}, int(row["step"]))
    seconds = rows[last_shown + 1]["timing_s/update_actor"]
    status.enter("update_actor")
    clock += seconds
    status.leave()
    status.enter("update_actor")
    clock += 0.6 * seconds
    status.host_memory = lambda: gibibytes
    output.print(status)
    picture = output.export_svg(title=f"megarl train --config-name {folder.parent.name}", theme=MONOKAI)
    target.write_text(
        _WEB_FONT.sub("", picture).replace("Fira Code", "Fira Code, DejaVu Sans Mono, Menlo"), encoding="utf-8"
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
