"""A callback that writes each step's tokens with their experts and weight versions, and a check of these files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from megarl.trainer.callbacks import Callback, TrainerView


class RouteRecorder(Callback):
    """Writes ``routes-<step>.pt``: of each row the prompt, the response, the experts and the weight versions."""

    def on_step_end(self, view: TrainerView) -> None:
        """Write the rows of a step."""
        assert view.batch is not None
        names = ("prompts", "responses", "routed_experts", "weight_versions")
        columns = {name: view.batch.unpadded(name) for name in names}
        torch.save([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
                   view.folder / f"routes-{view.step}.pt")  # fmt: skip


class RouteCounts(NamedTuple):
    """Tokens that the first weights computed, rows of several versions, and experts that newer weights changed."""

    unchanged: int
    interrupted: int
    changed: int


def assert_first_experts(rows: list[dict[str, torch.Tensor]], folder: Path) -> RouteCounts:
    """Every token that the first weights computed has the experts of transformers with the weights of a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first = min(int(row["weight_versions"].min()) for row in rows)
    unchanged = interrupted = changed = 0
    for row in rows:
        prompt, routes, versions = len(row["prompts"]), row["routed_experts"], row["weight_versions"]
        assert len(routes) == prompt + len(row["responses"])
        assert (routes[:-1] >= 0).all() and (routes[-1] == -1).all(), "the engine has not computed the last token"
        # A token is computed to generate the next one; the prompt, to generate the first one.
        initial = prompt + int((versions == first).sum()) - 1 if versions[0] == first else 0
        expected = experts_of(model, torch.cat([row["prompts"], row["responses"]]))
        assert torch.equal(routes[:initial].sort(-1).values, expected[:initial])
        unchanged += initial
        interrupted += bool(versions[0] != versions[-1])
        changed += int((routes[initial:-1].sort(-1).values != expected[initial:-1]).sum())
    return RouteCounts(unchanged, interrupted, changed)


@torch.no_grad()
def experts_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Sorted experts ``[tokens, layers, per token]`` that the routers of transformers select."""
    chosen: list[torch.Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda *call: chosen.append(call[2][2])) for router in routers]
    model(ids[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).sort(-1).values.to(torch.int16)
