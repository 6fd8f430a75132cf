"""Converts checkpoints between Hugging Face and Megatron, on any machine: no GPU, no process group, no model.

Every format is described as the same thing, Hugging Face tensors in parts of stored ones
(:mod:`megarl.convert.stored`), and every output as files of bands at known bytes (:mod:`megarl.convert.output`); what
is between only copies bands.
"""
