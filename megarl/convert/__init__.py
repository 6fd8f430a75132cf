"""Checkpoint conversion between Hugging Face and Megatron: needs no GPU, process group or model.

Every input format is described as Hugging Face tensors in regions of stored tensors (:mod:`megarl.convert.stored`).
Every output is planned as files of bands at fixed byte offsets (:mod:`megarl.convert.output`), which are then copied.
"""
