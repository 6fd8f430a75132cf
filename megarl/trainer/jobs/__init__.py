"""Jobs of the command line: train, sft, reward model, evaluate and generate; each has ``run(config, folder)``."""
