"""Where the weight map's shards of a model lie in SGLang's ranks.

They differ in two things. SGLang pads the vocabulary to a multiple of 64 before it divides it, the weight map only as
far as it must, so that a rank's rows may be others: row 30 of 50 over two ranks lies in the map's second shard of 25,
and in SGLang's first of 32. And of latent attention with a latent of queries SGLang holds the two projections into
latents in one parameter, the rows of ``kv_a_proj_with_mqa`` under those of ``q_a_proj``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from megarl.errors import ConfigError, ModelError
from megarl.models import LocalParam, ModelConfig, WeightMap
from megarl.rollout.interface import EngineOptions

VOCAB_MULTIPLE = 64
"""SGLang's vocabulary has a multiple of this many rows."""

CPU_MULTIPLE = 32
"""On a CPU SGLang pads the width of a rank's MLP to a multiple of this."""

VOCAB_PARAMS = ("model.embed_tokens.weight", "lm_head.weight")

QUERY_LATENT, KEY_VALUE_LATENT = ".self_attn.q_a_proj.weight", ".self_attn.kv_a_proj_with_mqa.weight"
FUSED_LATENTS = ".self_attn.fused_qkv_a_proj_with_mqa.weight"


class Target(NamedTuple):
    """A parameter of one of SGLang's ranks.

    Attributes:
        shape: as SGLang holds it.
        live: extent of what a model's weights fill, from the start; the rest is vocabulary padding and holds zeros.
    """

    shape: tuple[int, ...]
    live: tuple[int, ...]


class Placed(NamedTuple):
    """A rectangle of values, to be written at ``start`` of a parameter of SGLang's rank ``rank``."""

    rank: int
    name: str
    start: tuple[int, ...]
    values: Tensor


class Held(NamedTuple):
    """Rows ``[first, first + rows)`` of parameter ``name`` of SGLang's rank ``rank``."""

    rank: int
    name: str
    first: int
    rows: int


class Placement:
    """Shards of one model over SGLang's tensor-parallel ranks.

    Args:
        config: the model.
        tp: tensor-parallel size.

    Raises:
        ConfigError: the model does not divide over ``tp`` ranks.
    """

    def __init__(self, config: ModelConfig, tp: int) -> None:
        self.tp, self._vocab = tp, config.vocab_size
        try:
            shards = [WeightMap(config).rollout_params(tp, rank) for rank in range(tp)]
        except ValueError as error:
            raise ConfigError(f"rollout.tensor_model_parallel_size={tp}: {error}") from None
        padded = -(-self._vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        if padded % tp:
            raise ConfigError(
                f"rollout.tensor_model_parallel_size={tp} does not divide SGLang's vocabulary of {padded} rows"
            )
        self._rows = padded // tp
        self.params: list[dict[str, LocalParam]] = [{param.name: param for param in shard} for shard in shards]
        self._fused = _fused_latents(self.params[0])

    def live_shape(self, rank: int, name: str) -> tuple[int, ...]:
        """Extent of the part of the map's shard that the model's weights fill."""
        shape = self.params[rank][name].shape
        if name not in VOCAB_PARAMS:
            return shape
        return (_within(self._vocab - rank * shape[0], shape[0]), *shape[1:])

    def targets(self, rank: int) -> dict[str, Target]:
        """The parameters that SGLang's rank must have, by name."""
        result: dict[str, Target] = {}
        for name, param in self.params[rank].items():
            rest = param.shape[1:]
            if name in VOCAB_PARAMS:
                live = _within(self._vocab - rank * self._rows, self._rows)
                result[name] = Target((self._rows, *rest), (live, *rest))
            else:
                # The parts of a fused parameter come in the order of their rows: the last one's end is its height.
                name, first = self._fused.get(name, (name, 0))
                shape = (first + param.shape[0], *rest)
                result[name] = Target(shape, shape)
        return result

    def place(self, rank: int, name: str, start: Sequence[int], values: Tensor) -> Iterator[Placed]:
        """The parts of a rectangle of the map's shard, where SGLang holds them; vocabulary padding is left out."""
        if name not in VOCAB_PARAMS:
            name, above = self._fused.get(name, (name, 0))
            yield Placed(rank, name, (above + start[0], *start[1:]), values)
            return
        first = rank * self.params[rank][name].shape[0] + start[0]
        stop = min(first + len(values), self._vocab)
        row = first
        while row < stop:
            holder = row // self._rows
            end = min((holder + 1) * self._rows, stop)
            at = (row - holder * self._rows, *start[1:])
            yield Placed(holder, name, at, values[row - first : end - first])
            row = end

    def held(self, rank: int, name: str) -> list[Held]:
        """Where the live rows of the map's shard lie in SGLang, in order."""
        rows = self.live_shape(rank, name)[0]
        if name not in VOCAB_PARAMS:
            return [Held(rank, *self._fused.get(name, (name, 0)), rows)]
        first = rank * self.params[rank][name].shape[0]
        parts, row = [], first
        while row < first + rows:
            holder = row // self._rows
            count = min((holder + 1) * self._rows, first + rows) - row
            parts.append(Held(holder, name, row - holder * self._rows, count))
            row += count
        return parts


def check_runs(config: ModelConfig, options: EngineOptions) -> None:
    """Refuses models that SGLang does not run, or would hold in another form, on such a replica.

    Raises:
        ModelError: names the part or the size.
    """
    tp = options.tensor_parallel_size
    if config.latent is not None and config.num_attention_heads % tp:
        raise ModelError(
            f"rollout engine 'sglang' over {tp} ranks needs num_attention_heads to be a multiple of {tp}, "
            f"{config.architecture} has {config.num_attention_heads}: a rank has whole heads of latent attention"
        )
    if options.device == "cpu":
        check_cpu_sizes(config, tp)


def check_cpu_sizes(config: ModelConfig, tp: int) -> None:
    """Refuses models that SGLang would pad on a CPU, where it wants whole heads and multiples of 32 on every rank.

    Raises:
        ModelError: names the size.
    """
    sizes = {
        "num_attention_heads": (config.num_attention_heads, tp),
        "num_key_value_heads": (config.num_key_value_heads, tp),
        "intermediate_size": (config.ffn_hidden_size, CPU_MULTIPLE * tp),
    }
    if config.experts is not None:
        sizes["moe_intermediate_size"] = (config.experts.ffn_hidden_size, CPU_MULTIPLE * tp)
        sizes["width of shared experts"] = (config.experts.shared_ffn_hidden_size, CPU_MULTIPLE * tp)
    for name, (size, multiple) in sizes.items():
        if size % multiple:
            raise ModelError(
                f"rollout engine 'sglang' on a CPU over {tp} ranks needs {name} to be a multiple of {multiple}, "
                f"{config.architecture} has {size}: SGLang would hold padded weights there"
            )


def _within(rows: int, most: int) -> int:
    return max(0, min(rows, most))


def _fused_latents(params: Mapping[str, LocalParam]) -> dict[str, tuple[str, int]]:
    """By the map's name: SGLang's parameter that holds these rows among others, and how many are above them."""
    fused = {}
    for name, param in params.items():
        layer = name.removesuffix(QUERY_LATENT)
        if layer != name:
            fused[name] = (layer + FUSED_LATENTS, 0)
            fused[layer + KEY_VALUE_LATENT] = (layer + FUSED_LATENTS, param.shape[0])
    return fused
