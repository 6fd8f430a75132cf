"""Let a vision-language model count the squares of held-out pictures, with ``transformers`` only."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

SHOWN = 3


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--pictures", type=Path, required=True, help="parquet file of tools/make_squares.py")
    parser.add_argument("--count", type=int, default=64, help="pictures to ask about")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    processor = AutoImageProcessor.from_pretrained(args.model, backend="pil", trust_remote_code=False)
    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32, trust_remote_code=False).eval()
    image_token, right = tokenizer.convert_ids_to_tokens(model.config.image_token_id), 0
    rows = pq.read_table(args.pictures).slice(0, args.count).to_pylist()
    print(args.model)
    for number, row in enumerate(rows):
        inputs = processor(images=[Image.open(io.BytesIO(row["images"][0]["bytes"]))], return_tensors="pt")
        tokens = int(inputs["image_grid_thw"].prod()) // processor.merge_size**2
        text = row["prompt"][0]["content"].removeprefix("<image>")
        content = [{"type": "image"}, {"type": "text", "text": text}]
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(prompt.replace(image_token, image_token * tokens), return_tensors="pt")["input_ids"]
        kinds = (ids == model.config.image_token_id).long()
        with torch.no_grad():
            output = model.generate(ids, mm_token_type_ids=kinds, **inputs, do_sample=False, max_new_tokens=2)
        answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
        expected = row["reward_model"]["ground_truth"]
        right += answer == expected
        if number < SHOWN:
            print(f"  picture {number}: {text}  ->  {answer}, there are {expected}")
    print(f"  {right} of {len(rows)} answers are right")


if __name__ == "__main__":
    main()
