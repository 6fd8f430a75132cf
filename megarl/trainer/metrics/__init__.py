"""Metrics of a step, from moments and counts."""
