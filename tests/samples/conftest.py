from __future__ import annotations

from support.task_configs import arithmetic, train_config  # noqa: F401
