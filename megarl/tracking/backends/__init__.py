"""The trackers that come with megarl; importing this registers them."""

from megarl.tracking.backends import local, mlflow_run, swanlab_run, wandb_run

__all__ = ["local", "mlflow_run", "swanlab_run", "wandb_run"]
