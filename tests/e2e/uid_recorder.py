"""Records the prompts that a run trains, by a callback."""

from __future__ import annotations

from pathlib import Path

from megarl.trainer.callbacks import Callback, TrainerView

RECORDER = f"trainer.callbacks=[{Path(__file__)}:UidRecorder]"
FILE = "uids.txt"


class UidRecorder(Callback):
    """Appends the names of the groups of each step to a file in the folder of the run."""

    def on_step_end(self, view: TrainerView) -> None:
        """Write ``0-<step>-<place>`` of each group, as in synchronous training."""
        assert view.batch is not None
        uids = dict.fromkeys(view.batch.non_tensor_batch["uid"].tolist())
        with (view.folder / FILE).open("a", encoding="utf-8") as file:
            file.write("".join(f"{uid}\n" for uid in uids))


def trained_groups(folder: Path, prompts: int) -> list[int]:
    """Return the numbers of the trained groups of a run with ``prompts`` per step."""
    lines = (folder / FILE).read_text(encoding="utf-8").split()
    return [(int(step) - 1) * prompts + int(place) for _, step, place in (line.split("-") for line in lines)]
