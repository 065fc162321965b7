"""Exports of torch as models: counts of layers, parameters and flops, numbers, names, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.interop.torch_decoders import Gpt, Llama, OpenGain
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardplan.core.nested import as_nested
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.errors import ShardplanError, TypingError
from shardplan.interop.importers import load
from shardplan.strategy import Model

NAMES = {"ids": ("batch", "sequence")}


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights in f64, gains around 1."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    for p in module.parameters():
        p.data = 0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64) + (p.ndim == 1)
    return module


def tokens(vocab: int, *shape: int) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1))


def exported(module: nn.Module, *inputs: Tensor) -> Any:
    return torch.export.export(module, inputs)


def outputs(model: Model, module: nn.Module, inputs: Mapping[str, Tensor]) -> list[np.ndarray]:
    checkpoint = {n: p.detach().numpy() for n, p in module.named_parameters()}
    values = model.pack(checkpoint) | {n: x.numpy() for n, x in inputs.items()} | dict(model.constants)
    found = run_reference(model.program, [[values[n]] for n, _ in model.program.inputs])
    return [shards[0] for shards in found]


def times(program: Program) -> list[int]:
    return [op.times for s in program.steps if (op := as_nested(s.op))]


def flops(program: Program) -> float:
    """Of all steps, bodies as often as they run."""

    def each() -> Iterator[float]:
        for s in program.steps:
            body, op = as_nested(s.op), computing(s.op)
            yield body.times * flops(body.body) if body else op.flops(*program.step_types(s)[0]) if op else 0.0

    return sum(each())


def gpt(**fields: Any) -> nn.Module:
    return filled(Gpt(**({"layers": 5, "hidden": 12, "heads": 3, "vocab": 17, "positions": 7} | fields)))


def llama(**fields: Any) -> nn.Module:
    sizes = {"layers": 4, "hidden": 24, "heads": 6, "kv_heads": 2, "ffn": 20, "vocab": 19}
    return filled(Llama(**(sizes | fields)))


@pytest.mark.parametrize("module", [gpt(), llama(), llama(kv_heads=6), llama(norm=OpenGain)], ids=str.__class__)
def test_numbers_are_those_of_torch(module: nn.Module) -> None:
    ids = tokens(17, 2, 7)
    model = load(exported(module, ids), NAMES)
    (found,) = outputs(model, module, {"ids": ids})
    wanted = module(ids).detach().numpy()
    assert np.abs(found - wanted).max() <= 1e-9 * np.abs(wanted).max()
    assert len(times(model.program)) == 1
    assert model.parameter_count == sum(p.numel() for p in module.parameters())


def test_a_loss_is_trained_with_our_gradients() -> None:
    module, (ids, targets) = gpt(), tokens(17, 2, 2, 7)
    model = load(exported(module, ids, targets), NAMES, training=True)
    found = dict(zip(model.program.outputs, outputs(model, module, {"ids": ids, "targets": targets}), strict=True))
    loss = module(ids, targets)
    loss.backward()
    assert abs(found["loss"] - loss.item()) <= 1e-9
    mine = model.unpack({p: found[g] for p, g in model.gradients.items()})
    for name, p in module.named_parameters():
        assert p.grad is not None
        assert np.abs(mine[name] - p.grad.numpy()).max() <= 1e-9 * max(1.0, p.grad.abs().max().item()), name


def test_heads_and_others_have_names() -> None:
    module = llama()
    model = load(exported(module, tokens(17, 2, 7)), NAMES)
    assert model.dims["blocks.k.weight"] == ("layer", "kv_heads", "head", "hidden")
    assert model.dims["blocks.q.weight"] == ("layer", "kv_heads", "ratio", "head", "hidden")
    assert model.dims["blocks.o.weight"] == ("layer", "hidden", "kv_heads", "ratio", "head")
    assert model.dims["blocks.up.weight"] == ("layer", "ffn", "hidden")
    assert model.dims["tokens.weight"] == ("vocab", "hidden")
    assert model.dims["ids"] == ("batch", "sequence")
    model = load(exported(gpt(), tokens(17, 2, 7)))
    assert model.dims["blocks.fused.weight"][2:] == ("kv_heads", "head", "hidden")
    assert model.dims["ids"] == ("batch", "sequence")  # as attention says


def shapes(program: Program) -> list[Any]:
    """A program without names."""
    return [
        (s.op if not (op := as_nested(s.op)) else (op.times, shapes(op.body)), [program.types[o] for o in s.operands])
        for s in program.steps
    ]


def test_other_names_change_nothing() -> None:
    class Renamed(nn.Module):
        def __init__(self, module: Llama) -> None:
            super().__init__()
            self.zebra, self.width = module.tokens, module.width
            self.yak, self.fox = module.head, module.norm
            for k, block in enumerate(module.blocks):
                setattr(self, f"animal{'qwertyuiop'[k]}", block)

        def forward(self, ids: Tensor) -> Tensor:
            plain = Llama.forward
            self_ = type("Plain", (), {})()
            self_.tokens, self_.head, self_.norm, self_.width = self.zebra, self.yak, self.fox, self.width
            self_.blocks = [getattr(self, f"animal{'qwertyuiop'[k]}") for k in range(4)]
            return plain(self_, ids)

    module, ids = llama(), tokens(17, 2, 7)
    other = Renamed(module).eval()  # type: ignore[arg-type]
    a, b = load(exported(module, ids), NAMES), load(exported(other, ids), NAMES)
    assert shapes(a.program) == shapes(b.program)
    assert sorted(a.dims.values()) == sorted(b.dims.values())
    assert np.array_equal(outputs(a, module, {"ids": ids})[0], outputs(b, other, {"ids": ids})[0])


def test_an_unlike_layer_gives_three_runs() -> None:
    module, ids = gpt(layers=7, odd=[3]), tokens(17, 2, 7)
    model = load(exported(module, ids))
    assert times(model.program) == [3, 1, 3]
    (found,) = outputs(model, module, {"ids": ids})
    assert np.abs(found - module(ids).detach().numpy()).max() <= 1e-9


@pytest.mark.parametrize(
    ("preset", "make"),
    [
        ("gpt2", lambda c: Gpt(c["layers"], c["hidden"], c["heads"], c["vocab"], c["seq"])),
        ("llama3-8b", lambda c: Llama(*(c[n] for n in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")))),
    ],
)
def test_a_model_imported_is_the_one_built(preset: str, make: Any) -> None:
    built = Model.load(preset, training=False, layers=3, seq=256)
    with FakeTensorMode():
        module = make(built.fields).eval()
        export = exported(module, torch.zeros(1, 256, dtype=torch.long))
    model = load(export, NAMES)
    assert times(model.program) == times(built.program)
    assert model.parameter_count == built.parameter_count
    assert flops(model.program) == pytest.approx(flops(built.program), rel=1e-3)


def test_a_tensor_with_two_names_is_one_parameter() -> None:
    module, ids = llama(), tokens(17, 2, 7)
    module.head.weight = module.tokens.weight  # type: ignore[union-attr]
    model = load(exported(module, ids), NAMES)
    assert model.parameter_count == sum(p.numel() for p in module.parameters())
    found = outputs(model, module, {"ids": ids})[0]
    assert np.abs(found - module(ids).detach().numpy()).max() <= 1e-9


class Strange(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x).real + torch.erfinv(x) + torch.erfinv(x * 0.5)


def test_all_that_is_unknown_is_said_at_once() -> None:
    export = exported(Strange(), torch.zeros(3, 3))
    with pytest.raises(TypingError) as error:
        load(export)
    text = str(error.value)
    assert "aten.fft_fft.default, 1 times" in text
    assert "aten.erfinv.default, 2 times" in text
    assert "return torch.fft" in text
    assert "opaque=True" in text


def test_what_is_unknown_may_be_opaque() -> None:
    with pytest.warns(UserWarning, match="operations are opaque"):
        model = load(exported(Strange(), torch.zeros(3, 3)), opaque=True)
    assert [s.op.name for s in model.program.steps].count("opaque") >= 3


def test_a_source_of_another_kind_is_refused() -> None:
    with pytest.raises(ShardplanError, match="legal are an ExportedProgram"):
        load(3)
    with pytest.raises(ShardplanError, match=r"paths that end in \.onnx, \.pt2"):
        load("model.txt")


def test_a_file_is_read(tmp_path: Any) -> None:
    module, ids = gpt(), tokens(17, 2, 7)
    torch.export.save(exported(module, ids), tmp_path / "small.pt2")
    model = load(tmp_path / "small.pt2", NAMES)
    assert model.name == "small"
    assert np.abs(outputs(model, module, {"ids": ids})[0] - module(ids).detach().numpy()).max() <= 1e-9
