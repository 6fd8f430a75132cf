"""Timeline summary: ``megarl timeline`` prints busy shares, phases and gaps of a recorded run."""
