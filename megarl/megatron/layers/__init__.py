"""Layers and outputs of a model, and layouts of packed tokens."""
