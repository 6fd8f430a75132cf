"""State of a run: step, data order, checkpoints and their manifests, and the conditions that stop a run."""
