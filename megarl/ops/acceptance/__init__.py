"""Acceptance of a machine: stages that run megarl's parts on its GPU and compare with transformers and the plan."""
