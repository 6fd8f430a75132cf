"""Names in a folder of checkpoints, shared by trainer, workers and converter."""

POINTER = "latest_checkpointed_iteration.txt"
"""File next to the checkpoints with the step of the newest one, as in Megatron-LM."""
HF_FOLDER = "huggingface"
"""Folder of a role with the model's Hugging Face config, tokenizer and, if exported, weights."""
