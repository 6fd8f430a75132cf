"""Build the vision example's task from a seed: pictures of squares to count, and a small vision-language model.

Writes, under ``--out``::

    model/              config.json, model.safetensors, tokenizer files, preprocessor_config.json (Qwen2.5-VL)
    data/train.parquet  prompts for reinforcement learning   (verl's RLHF schema, with pictures in ``images``)
    data/test.parquet   held-out pictures

Every prompt has the same text, so that a model which does not see the pictures cannot solve the task. The model is
warmed up with demonstrations that are imperfect on purpose: most of them miss one square of three or more. Vision tower
and language model learn together here; the tower stays frozen in reinforcement learning.

Nothing is downloaded; the same seed gives the same bytes on the same machine.
"""

from __future__ import annotations

import argparse
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from make_arithmetic import build_tokenizer, write_parquet
from PIL import Image, ImageDraw
from transformers import (
    AutoImageProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

DATA_SOURCE = "squares"
QUESTION = "How many squares?"
SIDE, CELL, CELLS = 56, 14, 4
"""Width of a picture and of its cells, in pixels, and cells along a side; a cell has at most one square."""
MOST_SQUARES = 6
MISSES_ONE = 0.8
START, END = "<|im_start|>", "<|im_end|>"
VISION_START, IMAGE, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": CELL,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": SIDE * SIDE,
    "max_pixels": 16 * SIDE * SIDE,
}


class Picture(NamedTuple):
    """An encoded picture and its number of squares."""

    png: bytes
    squares: int


def task_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the task's words, and the markers of Qwen2.5-VL as special tokens."""
    tokenizer = build_tokenizer(["How", "Ġmany", "Ġsquares", "user", "assistant"])
    markers = [START, END, VISION_START, IMAGE, VISION_END]
    tokenizer.add_special_tokens({"additional_special_tokens": markers, "eos_token": END})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def draw_picture(rng: random.Random) -> Picture:
    """Draw 1 to :data:`MOST_SQUARES` filled squares of random sizes, colors and cells on a light ground."""
    squares = rng.randint(1, MOST_SQUARES)
    picture = Image.new("RGB", (SIDE, SIDE), tuple(rng.randint(225, 255) for _ in range(3)))
    draw = ImageDraw.Draw(picture)
    for cell in rng.sample(range(CELLS * CELLS), squares):
        size = rng.randint(CELL // 2, CELL - 2)
        left, top = (CELL * at + rng.randint(0, CELL - size) for at in divmod(cell, CELLS))
        color = tuple(rng.randint(0, 140) for _ in range(3))
        draw.rectangle((left, top, left + size - 1, top + size - 1), fill=color)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return Picture(file.getvalue(), squares)


def picture_row(picture: Picture, split: str, index: int) -> dict[str, Any]:
    """Return one picture in verl's RLHF schema."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"<image>{QUESTION}"}],
        "images": [{"bytes": picture.png}],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": str(picture.squares)},
        "extra_info": {"split": split, "index": index},
    }


def build_model(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> Qwen2_5_VLForConditionalGeneration:
    """Build a Qwen2.5-VL with random weights, sized for a laptop."""
    pairs = hidden // 4 // 2  # pairs of dimensions of a head
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.06,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    tower = {
        "depth": 2,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": 4,
        "out_hidden_size": hidden,
        "patch_size": CELL,
        "spatial_merge_size": 2,
        "window_size": 8 * CELL,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.06,
    }
    # SGLang looks for a video at each token of videos, so it is one that the task does not use.
    vision, begin, end, video = tokenizer.convert_tokens_to_ids([IMAGE, VISION_START, VISION_END, "<|system|>"])
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=vision,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def model_inputs(folder: Path, tokenizer: PreTrainedTokenizerFast, pictures: Sequence[Picture]) -> dict[str, Any]:
    """Return the prompts of pictures of one size, as transformers' model takes them."""
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    pixels = processor(images=[Image.open(io.BytesIO(picture.png)) for picture in pictures], return_tensors="pt")
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    tokens = (SIDE // CELL // processor.merge_size) ** 2
    ids = torch.tensor(tokenizer(text.replace(IMAGE, IMAGE * tokens), add_special_tokens=False)["input_ids"])
    ids = ids.expand(len(pictures), -1)
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    return {"input_ids": ids, "mm_token_type_ids": (ids == image).long(), **pixels}


def warm_up(
    model: Qwen2_5_VLForConditionalGeneration,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    steps: int,
    rows: int = 64,
) -> None:
    """Train on demonstrations, of which :data:`MISSES_ONE` miss one square of three or more."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(1, steps))
    end = tokenizer.eos_token_id
    for _ in range(steps):
        pictures = [draw_picture(rng) for _ in range(rows)]
        answers = [p.squares - (p.squares > 2 and rng.random() < MISSES_ONE) for p in pictures]
        inputs = model_inputs(folder, tokenizer, pictures)
        digits = tokenizer.convert_tokens_to_ids([str(answer) for answer in answers])
        targets = torch.tensor([[digit, end] for digit in digits])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], targets], 1)
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, 2))
        logits = model(**inputs).logits[:, -3:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(
    model: Qwen2_5_VLForConditionalGeneration,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    pictures: Sequence[Picture],
) -> float:
    """Return the share of pictures whose most likely answer is right."""
    logits = model(**model_inputs(folder, tokenizer, pictures)).logits[:, -1]
    right = tokenizer.convert_tokens_to_ids([str(picture.squares) for picture in pictures])
    return float((logits.argmax(-1) == torch.tensor(right)).float().mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/vision/task"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-train", type=int, default=4096, help="pictures to train on")
    parser.add_argument("--num-test", type=int, default=256, help="held-out pictures")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=400, help="steps on demonstrations; 0 = random weights")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    tokenizer, folder = task_tokenizer(), args.out / "model"
    model = build_model(tokenizer, args.hidden, args.layers)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n", encoding="utf-8")
    rng = random.Random(args.seed)
    train, test = ([draw_picture(rng) for _ in range(count)] for count in (args.num_train, args.num_test))
    for split, pictures in (("train", train), ("test", test)):
        rows = [picture_row(picture, split, index) for index, picture in enumerate(pictures)]
        write_parquet(rows, args.out / "data" / f"{split}.parquet", with_response=False)
    warm_up(model, folder, tokenizer, rng, args.warm_up)
    model.save_pretrained(folder)
    report = {"out": str(args.out), "parameters": sum(p.numel() for p in model.parameters())}
    print(json.dumps(report | {"accuracy": round(accuracy(model, folder, tokenizer, test), 3)}))


if __name__ == "__main__":
    main()
