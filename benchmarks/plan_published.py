"""Memory predicted by `megarl plan` against published figures.

    python benchmarks/plan_published.py

Sources:

- Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198: Table 2
  (activation bytes of a layer), section 4.2.3 (the first stage under the interleaved schedule), Table 3 (models and
  layouts; sequences of 2,048 tokens, a vocabulary of 51,200).
- Narayanan et al. 2021, arXiv 2104.04473, Table 1: parameters of the models of 530 and 1,008 billion.
- Megatron-Core's documentation of the distributed optimizer, table of bytes per parameter.
- Megatron-LM's `theoretical_memory_usage.py`: weights and optimizer of the fullest rank.
- Sheng et al. 2024, HybridFlow, arXiv 2409.19256, section 2.3: weights that a 70B actor sends in each iteration.
- The models' reports: parameters.

The GPT models of the papers have an MLP of two matrices and 4 h, dropout masks and learned positions. megarl's models
of the same size have a gated MLP of three matrices and 8/3 h, rotary embeddings and no dropout: the same number of
weights. Of a layer's 34 bytes per element, 2 are missing (masks) and 4 are additional (queries and keys, rotated and
unrotated). Without sequence parallelism every rank has all masks, but only its share of rotated heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import MegatronConfig
from megarl.models import ModelConfig, ParallelLayout, WeightMap, parse_model_config, read_model_config
from megarl.ops.plan.job import PlannedPass, PlannedRole
from megarl.ops.plan.pass_activations import LayerBytes, kept_by_layers, tokens_on_rank
from megarl.ops.plan.states import StateCounter, rollout_weight_bytes

MODELS = Path(__file__).parent.parent / "tests" / "ops" / "plan" / "models"
SEQUENCE, VOCABULARY = 2048, 51200


class Gpt(NamedTuple):
    """A row of Korthikanti's Table 3, with the published number of parameters (in billions)."""

    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    chunks: int
    micro_batch: int
    billions: float


GPTS = {
    "22B": Gpt(64, 6144, 48, 8, 1, 1, 4, 22),
    "175B": Gpt(96, 12288, 96, 8, 8, 3, 1, 175),
    "530B": Gpt(128, 20480, 105, 8, 35, 3, 1, 529.6),
    "1T": Gpt(160, 25600, 128, 8, 64, 1, 1, 1008.0),
}
REPORTED = {"Qwen2.5-7B": 7.61, "Llama-3-70B": 70.6, "Qwen3-30B-A3B": 30.5, "DeepSeek-V3": 671}


class Row(NamedTuple):
    """A published figure and the planned one."""

    source: str
    what: str
    published: float
    ours: float
    unit: str

    @property
    def distance(self) -> float:
        """Planned figure over the published one, minus 1."""
        return self.ours / self.published - 1


def rows() -> list[Row]:
    """Return all comparisons."""
    return [*parameters(), *bytes_per_parameter(), *states(), *activations(), *first_stage(), handed_over()]


def parameters() -> list[Row]:
    """Compare the weights of whole models."""
    result = []
    for name, billions in REPORTED.items():
        shapes = WeightMap(read_model_config(MODELS / name)).hf_shapes()
        result.append(Row("model's report", f"{name}: parameters", billions, _count(shapes) / 1e9, "10⁹"))
    for name, gpt in GPTS.items():
        source = "2205.05198 T3" if gpt.billions in (22, 175) else "2104.04473 T1"
        shapes = WeightMap(_model(gpt)).hf_shapes()
        result.append(Row(source, f"GPT {name}: parameters", gpt.billions, _count(shapes) / 1e9, "10⁹"))
    return result


def bytes_per_parameter() -> list[Row]:
    """Compare weights, gradients and optimizer state, at eight data-parallel ranks."""
    cases = {
        ("bfloat16", False): 18.0,
        ("bfloat16", True): 6 + 12 / 8,
        ("float32", False): 16.0,
        ("float32", True): 8 + 8 / 8,
    }
    result = []
    for (dtype, distributed), published in cases.items():
        megatron = MegatronConfig(dtype=dtype, use_distributed_optimizer=distributed)
        model = read_model_config(MODELS / "Qwen2.5-7B")
        states = StateCounter(_role(model, ParallelLayout(dp=8), megatron)).of(0)
        kind = "distributed, 8 ranks" if distributed else "not distributed"
        ours = states.total / states.parameters
        result.append(Row("Megatron-Core docs", f"{dtype}, optimizer {kind}", published, ours, "B/parameter"))
    return result


def states() -> list[Row]:
    """Compare the states of the fullest rank with Megatron-LM's estimate."""
    result = []
    for name, gpt in GPTS.items():
        layers = 12 * gpt.layers * gpt.hidden**2 / gpt.pp
        published = 18 * (layers + VOCABULARY * gpt.hidden) / gpt.tp
        role = _role(_model(gpt), _layout(gpt), MegatronConfig(use_distributed_optimizer=False))
        ours = StateCounter(role).of(0).total
        result.append(Row("Megatron-LM's script", f"GPT {name}: states of a rank", published / 1e9, ours / 1e9, "GB"))
    return result


def activations() -> list[Row]:
    """Compare one layer with Table 2, without the quadratic attention term, which flash attention does not save."""
    result = []
    for name, gpt in GPTS.items():
        element = SEQUENCE * gpt.micro_batch * gpt.hidden
        for what, published, sequence_parallel in (
            ("tensor parallel", element * (10 + 24 / gpt.tp), False),
            ("tensor and sequence parallel", element * 34 / gpt.tp, True),
        ):
            role = _role(_model(gpt), _layout(gpt), MegatronConfig(sequence_parallel=sequence_parallel))
            layer = LayerBytes(role, tokens_on_rank(role, _update(gpt)), True, frozenset()).of(0)
            result.append(Row("2205.05198 T2", f"GPT {name}: a layer, {what}", published / 1e6, layer / 1e6, "MB"))
    return result


def first_stage() -> list[Row]:
    """Compare the layers whose activations the first stage holds, by section 4.2.3."""
    result = []
    for name, gpt in GPTS.items():
        published = gpt.layers * (1 + (gpt.pp - 1) / (gpt.pp * gpt.chunks) if gpt.chunks > 1 else 1)
        role = _role(_model(gpt), _layout(gpt), MegatronConfig())
        tokens = tokens_on_rank(role, _update(gpt))
        layer = LayerBytes(role, tokens, True, frozenset()).of(0)
        kept, _ = kept_by_layers(role, tokens, 0, 10 * gpt.pp, fused=True)
        result.append(Row("2205.05198 4.2.3", f"GPT {name}: layers kept by stage 0", published, kept / layer, "layers"))
    return result


def handed_over() -> Row:
    """Compare the bytes that a 70B actor sends to generation in bfloat16."""
    model = read_model_config(MODELS / "Llama-3-70B")
    ours = rollout_weight_bytes(model, 1, 0, "bfloat16")
    return Row("HybridFlow 2.3", "70B actor: weights handed over", 140, ours / 1e9, "GB")


def _model(gpt: Gpt) -> ModelConfig:
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": gpt.hidden,
        "intermediate_size": -(-8 * gpt.hidden // 3 // gpt.tp) * gpt.tp,
        "num_hidden_layers": gpt.layers,
        "num_attention_heads": gpt.heads,
        "num_key_value_heads": gpt.heads,
        "max_position_embeddings": SEQUENCE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
    }
    return parse_model_config(raw)


def _layout(gpt: Gpt) -> ParallelLayout:
    return ParallelLayout(tp=gpt.tp, pp=gpt.pp, vpp=gpt.chunks)


def _role(model: ModelConfig, layout: ParallelLayout, megatron: MegatronConfig) -> PlannedRole:
    return PlannedRole("actor", "megatron", model, layout, megatron, False, True, ())


def _update(gpt: Gpt) -> PlannedPass:
    tokens = SEQUENCE * gpt.micro_batch
    return PlannedPass("update", True, tokens, tokens, 10 * gpt.pp, 1, 0, longest=SEQUENCE)


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    total = 0
    for shape in shapes.values():
        size = 1
        for n in shape:
            size *= n
        total += size
    return total


def line(row: Row) -> str:
    """Return a row of the table."""
    figures = f"{row.published:,.4g} {row.unit} | {row.ours:,.4g} {row.unit}"
    return f"| {row.source} | {row.what} | {figures} | {100 * row.distance:+.1f} % |"


def main() -> None:
    print("| source | what | published | megarl plan | distance |\n|---|---|---|---|---|")
    print("\n".join(map(line, rows())))


if __name__ == "__main__":
    main()
