"""A model class by name: the models that it makes of a config, what they save, and what its loader makes of that."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from shardplan.errors import LayoutError, ParseError, excerpt, line, optional
from shardplan.interop import safetensors
from shardplan.interop.derivation.forked_ranks import fork_ranks
from shardplan.movement.weights.probe import Named

# What fields of transformers' configs are in a trial, where a config has them: as small as heads and experts allow.
SMALL: dict[str, int] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "vocab_size": 120, "max_position_embeddings": 64, "moe_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "embedding_size": 24,
    "shared_expert_intermediate_size": 16, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "d_model": 32,
    "num_heads": 4, "num_layers": 2, "d_kv": 8, "d_ff": 48, "ffn_dim": 48, "word_embed_proj_dim": 32,
    "type_vocab_size": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_layers": 2,
    "encoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2,
}  # fmt: skip
_NOT_SAVED = ("rotary", "inv_freq")  # buffers that every framework works out
Failure = (ImportError, ValueError, RuntimeError, AttributeError, TypeError, KeyError, IndexError, ZeroDivisionError,
           AssertionError, NotImplementedError, OSError)  # fmt: skip
"""What a model's own code raises where sizes do not fit it, or it cannot be made here."""


@dataclass(frozen=True, slots=True)
class ModelClass:
    """A class of models, or a function that makes one of a config; `name` is as it was given."""

    name: str
    make: Any

    @staticmethod
    def find(name: str) -> ModelClass:
        """Return a class or function of `package.module:Name`, `package.module.Name`, or transformers' `Name`.

        Raises `ParseError` for what is none, and `Infeasible` for a package that is not installed.
        """
        text = name.strip()
        module, _, last = text.rpartition(":" if ":" in text else ".")
        if not last.isidentifier() or not all(part.isidentifier() for part in module.split(".") if module):
            raise ParseError(
                f"{excerpt(name)}; legal is a class, as transformers:LlamaForCausalLM or package.module:Name"
            )
        if not module:
            optional("transformers", "transformers")
        try:
            found = getattr(importlib.import_module(module or "transformers"), last, None)
        except ImportError as error:
            raise ParseError(f"{excerpt(name)}: {line(error)}; legal is a class of a package that is here") from None
        if not callable(found):
            raise ParseError(f"{excerpt(name)}: {module or 'transformers'} has no class or function {last}")
        return ModelClass(name, found)

    @property
    def kind(self) -> str:
        """How its weights are loaded: `load_weights`, `from_pretrained` or `load_state_dict`."""
        return next((k for k in ("load_weights", "from_pretrained") if hasattr(self.make, k)), "load_state_dict")

    def saves(self) -> ModelClass:
        """Return whose checkpoints it loads: itself, or transformers' class of the same name for a `load_weights`."""
        last = self.name.replace(":", ".").rpartition(".")[2]
        if self.kind != "load_weights":
            return self
        try:
            return ModelClass.find(last)
        except (ParseError, LayoutError):
            raise ParseError(f"{self.name} loads what transformers has no class for; legal is --reads CLASS") from None

    def config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config whose sizes are small: of transformers' class that of its own, else as it is given.

        Raises `LayoutError`.
        """
        kind = getattr(self.make, "config_class", None)
        if kind is None:
            if not given:
                raise LayoutError(f"{self.name} has no config_class; legal is --config with a small config")
            return dict(given)
        said = {k: v for k, v in given.items() if k not in SMALL and k not in ("architectures", "torch_dtype", "dtype")}
        try:
            own = kind(**said).to_dict()
            small = {k: v for k, v in SMALL.items() if isinstance(own.get(k), int)}
            return {**said, **small}
        except Failure as error:
            raise LayoutError(f"{self.name}: no config is made: {line(error)}") from None

    def model(self, config: Mapping[str, Any]) -> Any:
        """Return a model of a config, f32 on the CPU."""
        torch = optional("torch", "torch")
        kind = getattr(self.make, "config_class", None)
        made = SimpleNamespace(**config) if kind is None else kind(**config)
        with torch.random.fork_rng(devices=[]):
            return self.make(made).float()

    def saved_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of what a model of a config saves: `save_pretrained`, else its state."""
        model = self.model(config)
        if not hasattr(model, "save_pretrained"):
            return {n: tuple(t.shape) for n, t in model.state_dict().items()}
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
            model.save_pretrained(folder)
            out: dict[str, tuple[int, ...]] = {}
            for path in Path(folder).glob("*.safetensors"):
                with safetensors.open(path) as file:
                    out |= {name: tuple(file.entry(name).shape) for name in file.names}
        return out

    def loader(self, config: Mapping[str, Any], ranks: int) -> Callable[[Named], Mapping[int, Named]]:
        """Return what a trial calls: its own loader, on ranks of one process group; see `LoaderTrial`."""
        load = {"load_weights": self._load_weights, "from_pretrained": self._from_pretrained}.get(
            self.kind, self._load_state
        )
        if ranks == 1 and self.kind != "load_weights":
            return lambda named: {0: load(config, named)}
        return lambda named: fork_ranks(ranks, lambda _: load(config, named))

    def _load_weights(self, config: Mapping[str, Any], named: Named) -> dict[str, np.ndarray]:
        torch = optional("torch", "torch")
        model = self.model(config)
        for tensor in model.parameters():
            tensor.data.zero_()
        model.load_weights((n, torch.from_numpy(np.array(a))) for n, a in named.items())
        return _loaded_tensors(model)

    def _load_state(self, config: Mapping[str, Any], named: Named) -> dict[str, np.ndarray]:
        torch = optional("torch", "torch")
        model = self.model(config)
        model.load_state_dict({n: torch.from_numpy(np.array(a)) for n, a in named.items()}, strict=False)
        return _loaded_tensors(model)

    def _from_pretrained(self, config: Mapping[str, Any], named: Named) -> dict[str, np.ndarray]:
        torch = optional("torch", "torch")
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
            arrays = {n: np.ascontiguousarray(a, np.float32) for n, a in named.items()}
            safetensors.write(Path(folder) / "model.safetensors", arrays, {"format": "pt"})
            made = self.make.config_class(**config).to_dict() | {"architectures": [self.make.__name__]}
            (Path(folder) / "config.json").write_text(json.dumps(made | {"dtype": "float32"}, default=str))
            return _loaded_tensors(self.make.from_pretrained(folder, dtype=torch.float32))


def _loaded_tensors(model: Any) -> dict[str, np.ndarray]:
    """What a model has: its parameters, and buffers that are saved, each under its first name."""
    kept = model.state_dict().keys()
    held = dict(model.named_parameters())
    held |= {n: b for n, b in model.named_buffers() if n in kept and not any(w in n for w in _NOT_SAVED)}
    return {n: t.detach().float().numpy() for n, t in held.items()}
