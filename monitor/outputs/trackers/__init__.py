"""The run shown in an experiment tracker: one class each, each with a library of its own (an extra)."""

from attnwatch.monitor.outputs.trackers.mlflow import MlflowOutput
from attnwatch.monitor.outputs.trackers.tensorboard import TensorBoardOutput
from attnwatch.monitor.outputs.trackers.trackio import TrackioOutput
from attnwatch.monitor.outputs.trackers.wandb import WandbOutput

__all__ = ["MlflowOutput", "TensorBoardOutput", "TrackioOutput", "WandbOutput"]
