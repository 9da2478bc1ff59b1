"""``specjax train``: a model or a drafter from a configuration file."""

from specjax.training.config import TrainConfig


def run_train(config: TrainConfig) -> None:
    """``specjax train``."""
    from specjax.training.loop import train

    print(f"trained model: {train(config)}")
