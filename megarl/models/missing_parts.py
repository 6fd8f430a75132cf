"""Published architectures with layers that megarl does not compute, and the names of these parts."""

from __future__ import annotations

from collections.abc import Mapping

_MAMBA = "Mamba (state-space) layers"
_INDEXER = "sparse attention with an indexer"

MISSING_PARTS: Mapping[str, str] = {
    "Cohere": "LayerNorm with attention and MLP in parallel",
    "Cohere2": "LayerNorm with attention and MLP in parallel",
    "DeepseekV32": _INDEXER,
    "DeepseekV4": _INDEXER,
    "FalconH1": _MAMBA,
    "Gemma2": "soft caps on attention scores and logits",
    "Gemma3n": "per-layer embeddings",
    "Glm4": "rotary embeddings of adjacent elements in plain attention",
    "GlmMoeDsa": _INDEXER,
    "Jamba": _MAMBA,
    "KimiLinear": "Kimi delta attention (linear attention)",
    "Llama4": "chunked attention, and layers without rotary embeddings",
    "Mamba2": _MAMBA,
    "MiniMax": "lightning attention (linear attention)",
    "NemotronH": _MAMBA,
    "OlmoHybrid": "gated delta net layers with learning rates up to 2, and norms after attention",
    "Phi3": "fused projections in the checkpoint (qkv_proj, gate_up_proj)",
    "SmolLM3": "layers without rotary embeddings",
}
"""Parts by the architecture's name without its head; a family in ``external_lib`` takes precedence."""


def missing_parts(architecture: str) -> str:
    """Return the parts of an architecture that megarl lacks; empty if it is not listed.

    Args:
        architecture: name from ``architectures``, with any head or without one.
    """
    return MISSING_PARTS.get(architecture.partition("For")[0].removesuffix("Model"), "")
