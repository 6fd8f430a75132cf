"""Build the quickstart's task from a seed: a tokenizer, a small random Qwen2 model and arithmetic data.

Writes, under ``--out``::

    model/            config.json, model.safetensors, tokenizer files (random weights)
    data/train.parquet  prompts for reinforcement learning   (verl's RLHF schema)
    data/test.parquet   held-out problems, none of which is in train
    data/sft.parquet    train problems with their answers, for supervised warm-up

Nothing is downloaded; the same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

DATA_SOURCE = "arithmetic"
PAD, END = "<|endoftext|>", "<|end|>"
ROLES = ("system", "user", "assistant")
# One token opens each message: a prompt of this task is a dozen tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Whole words of the task; digits stay single tokens so that carrying can be learned.
WORDS = ["What", "Ġis", "Ġ+"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that spells anything, with the task's words and the chat's markers as single tokens."""
    markers = [f"<|{role}|>" for role in ROLES]
    vocabulary = {token: number for number, token in enumerate([PAD, END, *markers])}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for cut in range(1, len(word)):
            left, right = word[:cut], word[cut]
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=markers,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, hidden: int, layers: int) -> Qwen2ForCausalLM:
    """A Qwen2 model with random weights, sized for a laptop (about one million parameters)."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.06,  # near 1 / sqrt(hidden): so small a model learns sooner from larger weights
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def problem_row(a: int, b: int, split: str, index: int) -> dict:
    """One problem in verl's RLHF schema."""
    answer = str(a + b)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
        "response": answer,
    }


def build_problems(seed: int, largest: int, num_test: int) -> tuple[list[dict], list[dict]]:
    """All sums of two numbers up to ``largest``, shuffled, cut into train and test; no problem is in both."""
    pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
    random.Random(seed).shuffle(pairs)
    test = [problem_row(a, b, "test", i) for i, (a, b) in enumerate(pairs[:num_test])]
    train = [problem_row(a, b, "train", i) for i, (a, b) in enumerate(pairs[num_test:])]
    return train, test


def write_parquet(rows: list[dict], path: Path, *, with_response: bool) -> None:
    """Write rows as parquet; ``response`` is the supervised target and belongs in SFT data only."""
    columns = [key for key in rows[0] if with_response or key != "response"]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{key: row[key] for key in columns} for row in rows]), path)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart/task"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=99, help="largest number in a problem")
    parser.add_argument("--num-test", type=int, default=300, help="held-out problems")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()

    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.seed, args.hidden, args.layers)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    train, test = build_problems(args.seed, args.largest, args.num_test)
    write_parquet(train, args.out / "data" / "train.parquet", with_response=False)
    write_parquet(test, args.out / "data" / "test.parquet", with_response=False)
    write_parquet(train, args.out / "data" / "sft.parquet", with_response=True)
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"out": str(args.out), "parameters": parameters, "train": len(train), "test": len(test)}))


if __name__ == "__main__":
    main()
