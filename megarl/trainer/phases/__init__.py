"""Phases of a training step: rollout, dynamic sampling, rewards, advantages, rollout correction, validation."""
