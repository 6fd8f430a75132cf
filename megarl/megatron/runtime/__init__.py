"""Process groups, devices and memory below Megatron's models."""
