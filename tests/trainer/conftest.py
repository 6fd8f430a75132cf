from support.task_configs import arithmetic, evaluate_config, pair_config, sft_config, train_config  # noqa: F401
