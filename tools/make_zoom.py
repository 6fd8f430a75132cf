"""Build the zoom example's task from a seed: pictures with details that only a crop shows, and a small model.

Writes the files of ``tools/make_squares.py``. A picture has four quarters with 1 to 4 checkered squares each. One
quarter is tinted, and its squares are to be counted. The image processor halves a picture, by which each square takes
exactly the color of its ground: the prompt shows which quarter is tinted, and no square. A crop of a quarter has the
processor's size and shows them.

The model is warmed up with demonstrations of the two turns of ``examples/zoom_agent.py`` that are imperfect on purpose:
most of them zoom into the quarter after the tinted one. They count what the crop shows.

Nothing is downloaded; the same seed gives the same bytes on the same machine.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from make_arithmetic import write_parquet
from make_squares import CELL, IMAGE, PROCESSOR, QUESTION, SIDE, build_model, task_tokenizer
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.zoom_agent import quarter

DATA_SOURCE = "zoom"
MOST_SQUARES = 4
RIGHT_ZOOM = 0.3
GREY, TINT, CONTRAST = (128, 128, 128), (165, 90, 90), 90
BOX = 4
"""PIL's filter that averages blocks of pixels."""


class Picture(NamedTuple):
    """An encoded picture, its tinted quarter, and the number of squares in each."""

    png: bytes
    tinted: int
    squares: tuple[int, ...]

    @property
    def answer(self) -> str:
        """Squares of the tinted quarter."""
        return str(self.squares[self.tinted])


def draw_picture(rng: random.Random) -> Picture:
    """Draw four quarters of ``SIDE`` pixels, one of them tinted, with checkered squares in random cells."""
    tinted, squares = rng.randrange(4), tuple(rng.randint(1, MOST_SQUARES) for _ in range(4))
    pixels = np.empty((2 * SIDE, 2 * SIDE, 3), np.int64)
    cells = SIDE // CELL
    for number, count in enumerate(squares):
        top, left = (SIDE * at for at in divmod(number, 2))
        pixels[top : top + SIDE, left : left + SIDE] = TINT if number == tinted else GREY
        for cell in rng.sample(range(cells * cells), count):
            row, column = (CELL * at + 2 * rng.randint(0, 1) for at in divmod(cell, cells))
            size = 2 * rng.randint(4, 6)
            checkers = 1 - 2 * (np.add.outer(np.arange(size), np.arange(size)) % 2)
            pixels[top + row : top + row + size, left + column : left + column + size] += CONTRAST * checkers[..., None]
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "PNG")
    return Picture(file.getvalue(), tinted, squares)


def picture_row(picture: Picture, split: str, index: int) -> dict[str, Any]:
    """Return one picture in verl's RLHF schema."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"<image>{QUESTION}"}],
        "images": [{"bytes": picture.png}],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": picture.answer},
        "extra_info": {"split": split, "index": index, "tinted": picture.tinted + 1},
    }


def demonstrations(
    folder: Path, tokenizer: PreTrainedTokenizerFast, pictures: Sequence[Picture], zooms: Sequence[int]
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return conversations in which the model zooms and counts, as transformers' model takes them, and their targets.

    Targets are -100 at tokens that the model does not write.
    """
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    shown = [
        image
        for picture, zoom in zip(pictures, zooms, strict=True)
        for image in (Image.open(io.BytesIO(picture.png)), quarter(picture.png, zoom))
    ]
    pixels = processor(images=shown, return_tensors="pt")
    image, tokens = {"type": "image"}, (SIDE // CELL // processor.merge_size) ** 2
    rows, targets = list[list[int]](), list[list[int]]()
    for picture, zoom in zip(pictures, zooms, strict=True):
        messages = [
            {"role": "user", "content": [image, {"type": "text", "text": QUESTION}]},
            {"role": "assistant", "content": str(zoom + 1)},
            {"role": "user", "content": [image]},
            {"role": "assistant", "content": str(picture.squares[zoom])},
        ]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False)).replace(IMAGE, IMAGE * tokens)
        ids = tokenizer(text.removesuffix("\n"), add_special_tokens=False)["input_ids"]
        own = set[int]()
        ends = [at for at, number in enumerate(ids) if number == tokenizer.eos_token_id]
        for end in ends[1::2]:  # of the assistant's turns
            own |= {end - 1, end}
        rows.append(ids)
        targets.append([number if at in own else -100 for at, number in enumerate(ids)])
    ids = torch.tensor(rows)
    kinds = (ids == tokenizer.convert_tokens_to_ids(IMAGE)).long()
    return {"input_ids": ids, "mm_token_type_ids": kinds, **pixels}, torch.tensor(targets)


def warm_up(
    model: Qwen2_5_VLForConditionalGeneration,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    steps: int,
    rows: int = 64,
) -> None:
    """Train on demonstrations, of which :data:`RIGHT_ZOOM` zoom into the tinted quarter, the others into the next."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(1, steps))
    for _ in range(steps):
        pictures = [draw_picture(rng) for _ in range(rows)]
        zooms = [p.tinted if rng.random() < RIGHT_ZOOM else (p.tinted + 1) % 4 for p in pictures]
        inputs, targets = demonstrations(folder, tokenizer, pictures, zooms)
        logits = model(**inputs).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracies(
    model: Qwen2_5_VLForConditionalGeneration,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    pictures: Sequence[Picture],
) -> dict[str, float]:
    """Return the shares of most likely zooms into the tinted quarter, and of right counts after it."""
    inputs, targets = demonstrations(folder, tokenizer, pictures, [picture.tinted for picture in pictures])
    best = model(**inputs).logits.argmax(-1)[:, :-1]
    digits = (targets[:, 1:] != -100) & (targets[:, 1:] != tokenizer.eos_token_id)
    right = (best == targets[:, 1:])[digits].reshape(-1, 2).float().mean(0)
    return {"zooms": round(float(right[0]), 3), "counts": round(float(right[1]), 3)}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/zoom/task"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-train", type=int, default=4096, help="pictures to train on")
    parser.add_argument("--num-test", type=int, default=256, help="held-out pictures")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=300, help="steps on demonstrations; 0 = random weights")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    tokenizer, folder = task_tokenizer(), args.out / "model"
    model = build_model(tokenizer, args.hidden, args.layers)
    tokenizer.save_pretrained(folder)
    settings = {**PROCESSOR, "max_pixels": SIDE * SIDE, "resample": BOX}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    rng = random.Random(args.seed)
    train, test = ([draw_picture(rng) for _ in range(count)] for count in (args.num_train, args.num_test))
    for split, pictures in (("train", train), ("test", test)):
        rows = [picture_row(picture, split, index) for index, picture in enumerate(pictures)]
        write_parquet(rows, args.out / "data" / f"{split}.parquet", with_response=False)
    warm_up(model, folder, tokenizer, rng, args.warm_up)
    model.save_pretrained(folder)
    print(json.dumps({"out": str(args.out), **accuracies(model, folder, tokenizer, test)}))


if __name__ == "__main__":
    main()
