"""The rollout service: generates across training steps, under an admission rule that bounds staleness."""
