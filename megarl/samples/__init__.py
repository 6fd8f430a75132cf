"""The sample service: from prompts to scored batches, under an admission rule that bounds staleness."""
