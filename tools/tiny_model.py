"""Create a small random model of the same family as another, with its tokenizer, to run a cluster job on a laptop.

    python tools/tiny_model.py SOURCE TARGET [--layers 4] [--hidden 64]

SOURCE is a Hugging Face folder; its config.json and tokenizer are enough. The ratios of heads, groups and experts stay
the same if sizes allow, so that layouts divide the model in the same way. The vocabulary is unchanged.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

HEAD = 16
"""Width of a head."""


def shrunk_fields(raw: dict[str, Any], layers: int, hidden: int) -> dict[str, Any]:
    """Return the changed fields of a ``config.json``.

    Args:
        raw: the whole file.
        layers: number of decoder layers.
        hidden: hidden size, a multiple of 16.
    """
    heads = hidden // HEAD
    groups = max(1, heads * raw.get("num_key_value_heads", raw["num_attention_heads"]) // raw["num_attention_heads"])
    fields: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
    }
    if "head_dim" in raw:
        fields["head_dim"] = HEAD
    if "moe_intermediate_size" in raw:
        fields["moe_intermediate_size"] = hidden
    if kinds := raw.get("layer_types"):
        fields["layer_types"] = [kinds[layer % len(kinds)] for layer in range(layers)]
    return fields


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.hidden % HEAD:
        parser.error(f"--hidden={args.hidden} must be a multiple of {HEAD}")

    raw = json.loads((args.source / "config.json").read_text(encoding="utf-8"))
    args.target.mkdir(parents=True, exist_ok=True)
    for file in args.source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".bin", ".index.json", ".pt", ".pth")):
            shutil.copy(file, args.target / file.name)
    (args.target / "config.json").write_text(
        json.dumps(raw | shrunk_fields(raw, args.layers, args.hidden), indent=2) + "\n", encoding="utf-8"
    )
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(args.target, trust_remote_code=False), dtype=torch.float32, trust_remote_code=False
    )
    model.save_pretrained(args.target)
    print(f"{args.target}: {raw['architectures'][0]}, {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
