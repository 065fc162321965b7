"""Strategies: models on one device, and what a strategy makes of them.

Reading order:

- `sizes`      what models of a family are made of, by the field names of presets
- `parameter`  `Parameter`: an input of a model's program, and where a checkpoint has it
- `scope`      `Scope`: a model's program while it is written
- `attention`  the attention of a layer: with grouped heads, or of a latent; caches
- `decoders`   GPT-2 and GPT-3; Llama 3, Qwen3, Mixtral, DeepSeek-V3
- `perceptrons` DistIR's perceptron, DLRM
- `training`   gradients and updates: from a loss to a training step
- `periods`    where a list of steps may repeat itself
- `repeats`    layers that are written out, as the body of a `repeat`
- `model_sizes` a model's program with other sizes of its dims
- `model`      `Model`: a program with names, from a preset of `presets/*.toml` or a family
- `strategy`   `Strategy`, and `strategy_text`: one as a line of text; `partition/`, `schedules/`: what is made of it

This room imports `core` and the errors, and numpy.
"""

from shardplan.strategy.model import Model, presets
from shardplan.strategy.parameter import Parameter

__all__ = ["Model", "Parameter", "presets"]
