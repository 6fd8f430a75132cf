"""What distinguishes one family's layers from another's: attention, experts, latent attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts layers, and how a token's experts are chosen.

    A token's scores are ``softmax`` or ``sigmoid`` of the router's logits. Its ``per_token`` experts are those with the
    highest score (plus a correction that only the choice sees, if there is one), of the ``groups_per_token`` best
    groups of experts; their scores, normalised to sum to 1 if asked for and times ``scaling``, weigh their outputs.
    """

    count: int
    """Routed experts of a layer."""
    per_token: int
    """Experts that each token goes to."""
    ffn_hidden_size: int
    """Inner width of one expert."""
    layers: tuple[bool, ...]
    """For each decoder layer whether it has experts; the others are dense."""
    shared_ffn_hidden_size: int = 0
    """Inner width of the experts that every token goes to, taken together; 0 = there are none."""
    shared_gate: bool = False
    """A sigmoid gate scales the shared experts' output."""
    score: str = "softmax"
    """``softmax`` or ``sigmoid``."""
    normalize: bool = True
    """The chosen experts' weights sum to 1 (before ``scaling``)."""
    scaling: float = 1.0
    """Factor on the weights."""
    groups: int = 1
    """Groups that the experts are divided into, neighbours together."""
    groups_per_token: int = 1
    """Groups that a token's experts may come from."""
    group_best: int = 1
    """How many of a group's best scores are added up to rank the group."""
    correction_bias: bool = False
    """A bias per expert enters the choice of experts, not their weights."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values, and perhaps queries, come from narrow latents.

    The first ``nope_dim`` elements of a head carry no position; the last ``rope_dim`` are rotated, and of keys they are
    shared by all heads. Described in https://arxiv.org/abs/2405.04434.
    """

    q_lora_rank: int
    """Width of the latent of queries; 0 = queries are projected directly."""
    kv_lora_rank: int
    """Width of the latent of keys and values."""
    nope_dim: int
    rope_dim: int
    v_dim: int
    """Width of a value head."""
    interleaved: bool
    """Pairs to rotate are neighbours, not halves apart."""
    norm_eps: float = 1e-6
    """Epsilon of the norms on the latents."""


@dataclass(frozen=True)
class Traits:
    """What a family's ``config.json`` says beyond the sizes that all have."""

    qkv_bias: bool = False
    """Biases on q, k and v."""
    qk_norm: bool = False
    """A norm on each head's q and k."""
    experts: Experts | None = None
    """None for a dense model."""
    latent: Latent | None = None
    """None for plain multi-head attention."""
