"""The sizes of the smallest whole model that tests of training use."""

from specjax.training.objectives.whole_model import ModelSizes

SIZES = ModelSizes(
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=32,
)
