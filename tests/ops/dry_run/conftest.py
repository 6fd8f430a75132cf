from support.task_configs import arithmetic, pair_config, preference_config, sft_config, train_config  # noqa: F401
