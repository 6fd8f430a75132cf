"""Ask a Hugging Face model questions, with ``transformers`` only."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def answer(model: AutoModelForCausalLM, tokenizer: AutoTokenizer, question: str, max_new_tokens: int) -> str:
    """Return the model's greedy response to one user message."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="model folder")
    source.add_argument("--summary", type=Path, help="summary.json of a run; its hf_dir is the model folder")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("questions", nargs="+")
    args = parser.parse_args()

    folder = args.model or Path(json.loads(args.summary.read_text(encoding="utf-8"))["hf_dir"])
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    print(f"{folder}")
    for question in args.questions:
        print(f"  {question}  ->  {answer(model, tokenizer, question, args.max_new_tokens)}")


if __name__ == "__main__":
    main()
