"""Runs torch's host code for CUDA without a GPU; collected by ``CUDA_HOST=1 bash launch/test.sh`` only.

Kernels compute nothing, so no number means anything: the tests ask for types, devices, chosen kernels and exceptions.
Counts that a kernel would compute and that sizes depend on are made here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

collect_ignore_glob = [] if "CUDA_HOST_LIBRARIES" in os.environ else ["test_*.py"]
CUDA = torch.device("cuda")


def even_counts(total: int, groups: int) -> Tensor:
    """Divide ``total`` tokens over ``groups`` experts, as a copy from the host: int64 on the device."""
    return torch.tensor([total // groups + (group < total % groups) for group in range(groups)]).to(CUDA)


@pytest.fixture(autouse=True)
def counted_experts() -> Iterator[None]:
    """Gives each expert its share of the tokens, in Megatron's layers and in the embedded engine's."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    preprocess, bincount = MoEAlltoAllTokenDispatcher.preprocess, torch.Tensor.bincount

    def with_counts(dispatcher: Any, routing_map: Tensor) -> Tensor:
        counts: Tensor = preprocess(dispatcher, routing_map)
        return counts.copy_(even_counts(dispatcher.num_out_tokens, len(counts)))

    def counted(values: Tensor, *args: Any, minlength: int = 0, **options: Any) -> Tensor:
        bincount(values, *args, minlength=minlength, **options)
        return even_counts(values.numel(), minlength).to(values.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoEAlltoAllTokenDispatcher, "preprocess", with_counts)
        patch.setattr(torch.Tensor, "bincount", counted)
        yield


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """Frees the engines of a test: memory is the host's."""
    import gc

    yield
    gc.collect()


@pytest.fixture
def chosen_attention(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that torch chooses for its scaled dot-product attention."""
    from torch.nn.attention import SDPBackend

    names: set[str] = set()
    attend: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **options: Any) -> Tensor:
        if type(attn_mask) in (Tensor, type(None)):
            causal, scale, grouped = (options.get(name) for name in ("is_causal", "scale", "enable_gqa"))
            arguments = (query, key, value, attn_mask, 0.0, bool(causal))
            names.add(SDPBackend(torch._fused_sdp_choice(*arguments, scale=scale, enable_gqa=bool(grouped))).name)
        return attend(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    return names
