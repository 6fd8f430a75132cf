"""Location of the weight map's shards in SGLang's ranks.

They differ in two ways. SGLang pads the vocabulary to a multiple of 64 before dividing it; the weight map pads only as
far as needed. So a row may be in another rank: row 30 of 50 over two ranks is in the map's second shard of 25, and in
SGLang's first shard of 32. For latent attention with a query latent, SGLang stores both projections into latents in one
parameter: the rows of ``kv_a_proj_with_mqa`` follow those of ``q_a_proj``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from megarl.base.errors import ConfigError, ModelError
from megarl.models import LocalParam, ModelConfig, WeightMap
from megarl.models.checksum import ParamRectangle
from megarl.rollout.interface import EngineOptions

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this."""

CPU_MULTIPLE = 32
"""On a CPU SGLang pads the width of a rank's MLP to a multiple of this."""

VOCAB_PARAMS = ("model.embed_tokens.weight", "lm_head.weight")

QUERY_LATENT, KEY_VALUE_LATENT = ".self_attn.q_a_proj.weight", ".self_attn.kv_a_proj_with_mqa.weight"
FUSED_LATENTS = ".self_attn.fused_qkv_a_proj_with_mqa.weight"


class TargetParam(NamedTuple):
    """A parameter of one of SGLang's ranks.

    Attributes:
        shape: shape in SGLang.
        live: shape of the part with weights, from the start; the rest is vocabulary padding and holds zeros.
    """

    shape: tuple[int, ...]
    live: tuple[int, ...]


class RankSlice(NamedTuple):
    """Values to write at ``start`` of a parameter of SGLang's rank ``rank``."""

    rank: int
    name: str
    start: tuple[int, ...]
    values: Tensor


class RankRows(NamedTuple):
    """Rows ``[first, first + rows)`` of parameter ``name`` of SGLang's rank ``rank``."""

    rank: int
    name: str
    first: int
    rows: int


class SGLangShards:
    """Shards of one model over SGLang's tensor-parallel ranks.

    Args:
        config: model config.
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
        """Return the shape of the part of the map's shard that has weights."""
        shape = self.params[rank][name].shape
        if name not in VOCAB_PARAMS:
            return shape
        return (_within(self._vocab - rank * shape[0], shape[0]), *shape[1:])

    def target_params(self, rank: int) -> dict[str, TargetParam]:
        """Return the parameters that SGLang's rank must have, by name."""
        result: dict[str, TargetParam] = {}
        for name, param in self.params[rank].items():
            rest = param.shape[1:]
            if name in VOCAB_PARAMS:
                live = _within(self._vocab - rank * self._rows, self._rows)
                result[name] = TargetParam((self._rows, *rest), (live, *rest))
            else:
                # The parts of a fused parameter are in row order, so the last one's end is the number of rows.
                name, first = self._fused.get(name, (name, 0))
                shape = (first + param.shape[0], *rest)
                result[name] = TargetParam(shape, shape)
        return result

    def rank_slices(self, rank: int, name: str, start: Sequence[int], values: Tensor) -> Iterator[RankSlice]:
        """Yield the parts of a slice of the map's shard at their places in SGLang, without vocabulary padding."""
        if name not in VOCAB_PARAMS:
            name, first_row = self._fused.get(name, (name, 0))
            yield RankSlice(rank, name, (first_row + start[0], *start[1:]), values)
            return
        first = rank * self.params[rank][name].shape[0] + start[0]
        stop = min(first + len(values), self._vocab)
        row = first
        while row < stop:
            holder = row // self._rows
            end = min((holder + 1) * self._rows, stop)
            at = (row - holder * self._rows, *start[1:])
            yield RankSlice(holder, name, at, values[row - first : end - first])
            row = end

    def rank_rectangles(self, rank: int, part: ParamRectangle) -> Iterator[tuple[int, ParamRectangle]]:
        """Yield SGLang's ranks that hold a part of the map's shard, and the part at its place there."""
        if part.name not in VOCAB_PARAMS:
            name, first_row = self._fused.get(part.name, (part.name, 0))
            yield rank, part._replace(name=name, at=(first_row + part.at[0], *part.at[1:]))
            return
        first = rank * self.params[rank][part.name].shape[0] + part.at[0]
        row, stop = first, first + part.extent[0]
        while row < stop:
            holder = row // self._rows
            shape = (min((holder + 1) * self._rows, stop) - row, *part.shape[1:])
            yield (
                holder,
                part._replace(
                    at=(row - holder * self._rows, *part.at[1:]),
                    extent=shape,
                    start=(part.start[0] + row - first, *part.start[1:]),
                    shape=shape,
                ),
            )
            row += shape[0]

    def rank_rows(self, rank: int, name: str) -> list[RankRows]:
        """Return the rows in SGLang that hold the map's shard, in order, without vocabulary padding."""
        rows = self.live_shape(rank, name)[0]
        if name not in VOCAB_PARAMS:
            return [RankRows(rank, *self._fused.get(name, (name, 0)), rows)]
        first = rank * self.params[rank][name].shape[0]
        parts, row = [], first
        while row < first + rows:
            holder = row // self._rows
            count = min((holder + 1) * self._rows, first + rows) - row
            parts.append(RankRows(holder, name, row - holder * self._rows, count))
            row += count
        return parts


def check_model_runs(config: ModelConfig, options: EngineOptions) -> None:
    """Refuse models that SGLang does not support on such a replica, or stores in another form.

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
    """Refuse models that SGLang would pad on a CPU: it needs whole heads and multiples of 32 on every rank.

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
    """Return SGLang's fused parameter and the first row in it, by name in the weight map."""
    fused = {}
    for name, param in params.items():
        layer = name.removesuffix(QUERY_LATENT)
        if layer != name:
            fused[name] = (layer + FUSED_LATENTS, 0)
            fused[layer + KEY_VALUE_LATENT] = (layer + FUSED_LATENTS, param.shape[0])
    return fused
