"""Draw the weight sync of one matrix in two layers, from a training layout to an engine, by a real reshard plan.

    python tools/draw_resharding.py [docs/images/resharding.svg]

Every band of the picture is one transfer of the plan.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from megarl.models import ParallelLayout, WeightMap, parse_model_config
from megarl.sharding.placement import RolloutLayout
from megarl.sharding.plan import TransferOp, build_plan

OUTPUT = Path("docs/images/resharding.svg")
TRAIN, ROLLOUT = ParallelLayout(tp=2, pp=2), RolloutLayout(tp=4)
SOURCE, TARGET = "decoder.layers.{}.mlp.linear_fc1.weight", "model.layers.{}.mlp.gate_up_proj.weight"
LAYERS, FFN, HIDDEN = 2, 16, 4

COLOURS = ("#3b6fb6", "#2a9d8f", "#d98324", "#b5446e")
"""One per training rank."""
WIDTH, HEIGHT = 940, 640
TOP, BAR, LEFT, RIGHT = 100, 120, 190, 630
PIXELS_PER_ROW = 6.0
FONT = "font-family='system-ui, sans-serif'"


class Span(NamedTuple):
    """A range of rows, in pixels."""

    top: float
    bottom: float


def matrix_transfers() -> list[TransferOp]:
    """Return the transfers of the first MLP matrix of each layer."""
    config = parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": LAYERS,
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 2,
            "vocab_size": 32,
            "max_position_embeddings": 64,
        }
    )
    plan = build_plan(WeightMap(config), TRAIN, ROLLOUT, bucket_bytes=2**20, element_bytes=2)
    names = {TARGET.format(layer) for layer in range(LAYERS)}
    ops = (op for rank in range(ROLLOUT.world_size) for bucket in plan.received_by(rank) for op in bucket.ops)
    return [op for op in ops if op.dst_param in names]


def source_top(rank: int) -> float:
    """Return the top of a training rank's matrix."""
    return TOP + rank * 127.0


def target_top(rank: int, layer: int) -> float:
    """Return the top of a rollout rank's matrix of a layer."""
    return TOP + rank * 127.0 + layer * (2 * FFN / ROLLOUT.tp * PIXELS_PER_ROW + 5)


def spans(op: TransferOp) -> tuple[Span, Span]:
    """Return both ends of a transfer."""
    layer, rows = int(op.dst_param.split(".")[2]), op.shape[0]
    ends = []
    for top, start in (
        (source_top(op.src_rank), op.src_start[0]),
        (target_top(op.dst_rank, layer), op.dst_start[0]),
    ):
        ends.append(Span(top + start * PIXELS_PER_ROW, top + (start + rows) * PIXELS_PER_ROW))
    return ends[0], ends[1]


def text(x: float, y: float, content: str, *, size: int = 13, anchor: str = "middle", colour: str = "#222") -> str:
    """Return a line of text."""
    return f"<text x='{x}' y='{y}' font-size='{size}' {FONT} text-anchor='{anchor}' fill='{colour}'>{content}</text>"


def rectangle(x: float, span: Span, colour: str) -> str:
    """Return one end of a transfer."""
    return f"<rect x='{x}' y='{span.top:.1f}' width='{BAR}' height='{span.bottom - span.top:.1f}' fill='{colour}'/>"


def rule(x: float, y: float) -> str:
    """Return a line between the parts of a matrix."""
    return f"<line x1='{x}' y1='{y}' x2='{x + BAR}' y2='{y}' stroke='white' stroke-width='2'/>"


def band(source: Span, target: Span, colour: str) -> str:
    """Return the band of a transfer."""
    start, stop, middle = LEFT + BAR, RIGHT, (LEFT + BAR + RIGHT) / 2
    return (
        f"<path d='M{start},{source.top:.1f} C{middle},{source.top:.1f} {middle},{target.top:.1f} "
        f"{stop},{target.top:.1f} L{stop},{target.bottom:.1f} C{middle},{target.bottom:.1f} "
        f"{middle},{source.bottom:.1f} {start},{source.bottom:.1f} Z' fill='{colour}' fill-opacity='0.28'/>"
    )


def labels() -> list[str]:
    """Return the labels next to the bars."""
    parts = [
        text(LEFT + BAR / 2, 40, f"Actor: {TRAIN.describe().removesuffix(' DP1')}", size=18),
        text(LEFT + BAR / 2, 62, "linear_fc1: each rank its half of gate, then of up", colour="#666"),
        text(RIGHT + BAR / 2, 40, f"Engine: TP{ROLLOUT.tp}", size=18),
        text(RIGHT + BAR / 2, 62, "gate_up_proj: each rank its quarter of both", colour="#666"),
        text(
            WIDTH / 2,
            HEIGHT - 14,
            "Every band is one transfer: a rectangle of elements, sent once, to its final place.",
        ),
    ]
    for rank in range(TRAIN.world_size):
        coordinate, top = TRAIN.coordinate(rank), source_top(rank)
        parts.append(text(LEFT - 14, top + 40, f"rank {rank}", size=14, anchor="end", colour=COLOURS[rank]))
        parts.append(text(LEFT - 14, top + 58, f"stage {coordinate.pp}, tensor rank {coordinate.tp}", anchor="end"))
        parts.append(text(LEFT - 14, top + 76, f"layer {coordinate.pp}", anchor="end"))
        parts.append(rule(LEFT, top + FFN / TRAIN.tp * PIXELS_PER_ROW))
        for half, name in enumerate(("gate", "up")):
            middle = top + (half + 0.5) * FFN / TRAIN.tp * PIXELS_PER_ROW + 5
            parts.append(text(LEFT + BAR / 2, middle, name, colour="white"))
    for rank in range(ROLLOUT.world_size):
        top = target_top(rank, 0)
        parts.append(text(RIGHT + BAR + 80, top + 56, f"rank {rank}", size=14, anchor="start"))
        for layer in range(LAYERS):
            parts.append(rule(RIGHT, target_top(rank, layer) + FFN / ROLLOUT.tp * PIXELS_PER_ROW))
            middle = target_top(rank, layer) + FFN / ROLLOUT.tp * PIXELS_PER_ROW + 5
            parts.append(text(RIGHT + BAR + 12, middle, f"layer {layer}", anchor="start"))
    return parts


def draw() -> str:
    """Return the picture as SVG."""
    bands, ends = [], []
    for op in matrix_transfers():
        source, target = spans(op)
        colour = COLOURS[op.src_rank]
        bands.append(band(source, target, colour))
        ends += [rectangle(LEFT, source, colour), rectangle(RIGHT, target, colour)]
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>"
    title = "<title>Transfer of the first MLP matrix of two layers from the actor to the engine</title>"
    back = f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>"
    return "\n".join([head, title, back, *bands, *ends, *labels(), "</svg>"]) + "\n"


def main() -> None:
    """Write the picture."""
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(draw(), encoding="utf-8")
    print(f"{output}: {len(matrix_transfers())} transfers")


if __name__ == "__main__":
    main()
