"""SGLang's parameters in blockwise FP8: models that it holds so, names of scales, and memory of quantized matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.base.errors import ModelError, WeightSyncError
from megarl.config.schema.rollout import FP8, QUANTIZATION_KEY
from megarl.models import ModelConfig
from megarl.models.declaration import FP8_BLOCK
from megarl.models.fp8 import FP8_DTYPE, quantize_blocks
from megarl.rollout.interface import EngineOptions
from megarl.rollout.quantization import MatrixId, check_blocks

SCALES = "_scale_inv"
"""End of the name of a parameter's scales."""

UNUSED_SCALES = (".k_scale", ".v_scale")
"""Ends of the names of parameters that SGLang adds for a KV cache in FP8; they stay 1."""


def check_quantization(config: ModelConfig, options: EngineOptions) -> None:
    """Refuse models and devices whose weights SGLang would not hold in blockwise FP8, or in another form.

    Raises:
        ModelError: names the key and the reason.
    """
    setting = f"{QUANTIZATION_KEY}={FP8} with rollout.name=sglang"
    if options.device == "cpu":
        raise ModelError(
            f"{setting}: on a CPU SGLang repacks FP8 weights, which a weight sync cannot write; set "
            "rollout.name=embedded, or quantization=null"
        )
    if options.dtype != "bfloat16":
        raise ModelError(
            f"{setting} and rollout.dtype={options.dtype}: SGLang's FP8 layers compute in bfloat16; set dtype=bfloat16"
        )
    special = "gated delta nets" if config.linear is not None else "experts with biases" if config.sinks else None
    if special is not None:
        raise ModelError(
            f"{setting} is not supported for the {special} of {config.architecture}; set quantization=null"
        )
    if config.latent is not None and config.latent.q_lora_rank % FP8_BLOCK:
        raise ModelError(
            f"{setting}: q_lora_rank={config.latent.q_lora_rank} of {config.architecture} is no multiple of "
            f"{FP8_BLOCK}, and SGLang fuses both latents in one matrix; set quantization=null"
        )
    check_blocks(config, options.tensor_parallel_size)


class QuantizedViews(NamedTuple):
    """Views of the quantized matrices of a rank, by their names in the weight map; stacked for experts.

    Attributes:
        codes: e4m3 ``[rows, columns]``.
        scales: float32, one per block.
    """

    codes: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]

    def check(self) -> None:
        """Check the dtypes of codes and scales.

        Raises:
            WeightSyncError: SGLang holds a parameter in another format, such as scales that are powers of two.
        """
        for name, codes in self.codes.items():
            if codes.dtype != FP8_DTYPE:
                raise WeightSyncError(
                    f"SGLang holds '{name}' as {codes.dtype}, expected {FP8_DTYPE} for {QUANTIZATION_KEY}={FP8}"
                )
            scales = self.scales[name]
            if scales.dtype != torch.float32:
                raise WeightSyncError(
                    f"SGLang holds the scales of '{name}' as {scales.dtype}: powers of two (ue8m0), which megarl does "
                    f"not write. Choose another kernel with server_args.fp8_gemm_runner_backend, such as triton, or "
                    f"set {QUANTIZATION_KEY}=null"
                )

    def incoming(self, matrix: MatrixId, dtype: torch.dtype) -> Tensor:
        """Allocate memory for the unquantized weights of a matrix."""
        return torch.empty_like(self._select(self.codes, matrix), dtype=dtype)

    def store(self, matrix: MatrixId, weights: Tensor) -> Tensor:
        """Write codes and scales of a complete matrix; see :class:`~megarl.rollout.quantization.MatrixStorage`."""
        quantized = quantize_blocks(weights)
        self._select(self.codes, matrix).copy_(quantized.codes)
        self._select(self.scales, matrix).copy_(quantized.scales)
        return quantized.finite

    def _select(self, tensors: Mapping[str, Tensor], matrix: MatrixId) -> Tensor:
        name, number = matrix
        return tensors[name] if number is None else tensors[name][number]
