"""What an image, a sample and a pack cost to compute: whole numbers, the same on every rank. No torch.

From a model's shape (`cost_model("qwen3_vl_vit+qwen3_8b")`), from numbers in a file, or fitted to measured steps
(`StepTimer`, `bayplan calibrate`). docs/cost.md says which formula stands behind each number.
"""

from plugin.cost.core import MAX_COST, PER_COST, CostModel, EncoderCost, LlmCost, Unit
from plugin.cost.files import cost_file, read_cost_model
from plugin.cost.fitting import Column, Fit, PartFit, fit_timings
from plugin.cost.index import sample_costs
from plugin.cost.lookup import cost_model
from plugin.cost.nnls import non_negative_least_squares
from plugin.cost.presets import ENCODERS, LLMS, EncoderPreset, LlmPreset
from plugin.cost.shapes import EncoderShape, LlmShape, Projector, Work, from_shapes
from plugin.cost.timer import StepTimer
from plugin.cost.timings import BadLine, Features, Timing, Timings, features_of, read_timings

__all__ = [
    "ENCODERS",
    "LLMS",
    "MAX_COST",
    "PER_COST",
    "BadLine",
    "Column",
    "CostModel",
    "EncoderCost",
    "EncoderPreset",
    "EncoderShape",
    "Features",
    "Fit",
    "LlmCost",
    "LlmPreset",
    "LlmShape",
    "PartFit",
    "Projector",
    "StepTimer",
    "Timing",
    "Timings",
    "Unit",
    "Work",
    "cost_file",
    "cost_model",
    "features_of",
    "fit_timings",
    "from_shapes",
    "non_negative_least_squares",
    "read_cost_model",
    "read_timings",
    "sample_costs",
]
