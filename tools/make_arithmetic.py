"""Build the quickstart's task from a seed: a tokenizer, a small random model (Qwen2) and arithmetic data.

Writes, under ``--out``::

    model/            config.json, model.safetensors, tokenizer files (random weights)
    data/train.parquet  prompts for reinforcement learning   (verl's RLHF schema)
    data/test.parquet   held-out problems that are not in train
    data/sft.parquet    demonstrations for the supervised warm-up, in the order of two lessons
    data/pairs.parquet, data/pairs_test.parquet   a right and a wrong answer each, for a reward model

The demonstrations are imperfect on purpose, to leave room for reinforcement learning. The first lesson has sums without
a carry and a few with one. The second lesson has every sum, from students who usually forget to carry: their answers
are right without a carry, and mostly wrong with one.

Nothing is downloaded; the same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

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
CARRIES_IN_FIRST_LESSON = 0.1
FORGETS_TO_CARRY = 0.7
FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
}


def build_tokenizer(words: Sequence[str] = WORDS, tags: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer with the task's words and the chat markers as single tokens.

    Args:
        words: single tokens; a leading blank is written in the byte-level alphabet.
        tags: single tokens that are ordinary text, such as ``<search>``.
    """
    markers = [f"<|{role}|>" for role in ROLES]
    vocabulary = {token: number for number, token in enumerate([PAD, END, *markers])}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for word in words:
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
    fast.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def family_fields(family: str, hidden: int, layers: int) -> dict[str, Any]:
    """Return the fields of a family's ``config.json`` beyond the common sizes."""
    if family == "qwen2":
        return {}
    if family == "gpt_oss":
        rotary = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
        sizes = {"head_dim": hidden // 4, "intermediate_size": hidden, "sliding_window": 8}
        return {**sizes, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": rotary}
    return hybrid_fields(hidden, layers)


def hybrid_fields(hidden: int, layers: int) -> dict[str, Any]:
    """Return the fields of a model with gated delta nets, and attention in every second layer; Qwen3-Next's experts."""
    return {
        "layer_types": [("linear_attention", "full_attention")[layer % 2] for layer in range(layers)],
        "head_dim": hidden // 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "shared_expert_intermediate_size": hidden,
    }


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, hidden: int, layers: int, family: str = "qwen2"
) -> PreTrainedModel:
    """Build a model with random weights, sized for a laptop (about one million parameters)."""
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.06,  # near 1 / sqrt(hidden): so small a model learns sooner from larger weights
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **family_fields(family, hidden, layers),
    }
    return model_class(config_class(**fields))


def problem_row(a: int, b: int, split: str, index: int) -> dict[str, Any]:
    """Return one problem in verl's RLHF schema."""
    answer = str(a + b)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "terms": [a, b]},
        "response": answer,
    }


def build_problems(seed: int, largest: int, num_test: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return all sums of two numbers up to ``largest``, shuffled and split into disjoint train and test sets."""
    pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
    random.Random(seed).shuffle(pairs)
    test = [problem_row(a, b, "test", i) for i, (a, b) in enumerate(pairs[:num_test])]
    train = [problem_row(a, b, "train", i) for i, (a, b) in enumerate(pairs[num_test:])]
    return train, test


def needs_carry(a: int, b: int) -> bool:
    """Return whether adding two numbers digit by digit needs a carry."""
    return sum_without_carry(a, b) != a + b


def sum_without_carry(a: int, b: int) -> int:
    """Return the sum of two numbers digit by digit, without carries."""
    total, place = 0, 1
    while a or b:
        total += (a % 10 + b % 10) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total


def build_demonstrations(train: list[dict[str, Any]], seed: int, lessons: tuple[int, int]) -> list[dict[str, Any]]:
    """Return train problems with a demonstrated answer: ``lessons[0]`` easy rows, then ``lessons[1]`` careless ones.

    Each lesson repeats its problems in a new random order as often as needed; a problem has one answer.
    """
    rng = random.Random(seed)
    easy, careless = [], []
    for row in train:
        a, b = row["extra_info"]["terms"]
        if not needs_carry(a, b) or rng.random() < CARRIES_IN_FIRST_LESSON:
            easy.append(row)
        forgets = rng.random() < FORGETS_TO_CARRY
        careless.append({**row, "response": str(sum_without_carry(a, b))} if forgets else row)
    rows: list[dict[str, Any]] = []
    for problems, count in zip((easy, careless), lessons, strict=True):
        lesson: list[dict[str, Any]] = []
        while len(lesson) < count:
            lesson += rng.sample(problems, len(problems))
        rows += lesson[:count]
    return rows


def build_pairs(problems: list[dict[str, Any]], seed: int, count: int) -> list[dict[str, Any]]:
    """Return pairs for a reward model: the right answer to a problem, and the answer of another problem."""
    rng = random.Random(seed)
    answers = sorted({row["response"] for row in problems}, key=int)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        for row in rng.sample(problems, len(problems)):
            wrong = rng.choice([answer for answer in answers if answer != row["response"]])
            rows.append({"prompt": row["prompt"], "chosen": row["response"], "rejected": wrong})
    return rows[:count]


def write_parquet(rows: list[dict[str, Any]], path: Path, *, with_response: bool) -> None:
    """Write rows as parquet; ``response`` is the supervised target and belongs in SFT data only."""
    columns = [key for key in rows[0] if with_response or key != "response"]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{key: row[key] for key in columns} for row in rows]), path)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart/task"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=99, help="largest number in a problem")
    parser.add_argument("--num-test", type=int, default=300, help="held-out problems")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen2", help="family of the model")
    parser.add_argument(
        "--pairs", type=int, nargs=2, default=(20_000, 600), help="number of training and held-out pairs"
    )
    parser.add_argument("--lessons", type=int, nargs=2, default=(120 * 256, 180 * 256), help="rows of each lesson")
    args = parser.parse_args(argv)

    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.seed, args.hidden, args.layers, args.family)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    train, test = build_problems(args.seed, args.largest, args.num_test)
    write_parquet(train, args.out / "data" / "train.parquet", with_response=False)
    write_parquet(test, args.out / "data" / "test.parquet", with_response=False)
    demonstrations = build_demonstrations(train, args.seed, tuple(args.lessons))
    write_parquet(demonstrations, args.out / "data" / "sft.parquet", with_response=True)
    for name, problems, count in zip(("pairs", "pairs_test"), (train, test), args.pairs, strict=True):
        write_parquet(
            build_pairs(problems, args.seed, count), args.out / "data" / f"{name}.parquet", with_response=False
        )
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"out": str(args.out), "parameters": parameters, "train": len(train), "test": len(test)}))


if __name__ == "__main__":
    main()
