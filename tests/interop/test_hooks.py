"""The examples that hook into verl and SkyRL, on gloo.

Where a framework is not installed, classes with the names and signatures of its abstract ones stand in, and no code of
theirs. With verl 0.9.1 beside the project this is its own `CheckpointEngine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

import shardplan as sp
from rank_threads import in_threads

torch = pytest.importorskip("torch")
EXAMPLES = str(Path(__file__).parents[2] / "examples")
CONFIG = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
          "num_hidden_layers": 2, "vocab_size": 10, "tie_word_embeddings": False, "torch_dtype": "float32"}  # fmt: skip


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **classes: Any) -> None:
    """Put classes in the place of a module of a framework, unless it is installed."""
    with contextlib.suppress(ImportError):
        import_module(name)
        return
    for k in range(1, name.count(".") + 2):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:k]), ModuleType(name))
    for word, found in classes.items():
        setattr(sys.modules[name], word, found)


def trained() -> tuple[dict[str, Any], sp.Weights, list[dict[str, Any]]]:
    """A model of whole tensors, and what two ranks of Megatron hold of it, by the reference."""
    whole = sp.Weights.load("hf-llama", CONFIG)
    rng = torch.Generator().manual_seed(1)
    named = {n: torch.randn(s, generator=rng) for n, s, _ in whole.parameters(0)}
    actor = sp.Weights.load("megatron-llama", CONFIG, tensor=2)
    held = sp.refit(whole, actor).apply({0: {n: x.numpy() for n, x in named.items()}})
    return named, actor, [{n: torch.from_numpy(a) for n, a in held[r].items()} for r in range(2)]


def test_verl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Registry:
        found: ClassVar[dict[str, Any]] = {}

        @classmethod
        def register(cls, backend: str) -> Callable[[Any], Any]:
            return lambda kind: cls.found.setdefault(backend, kind)

        @classmethod
        def get(cls, backend: str) -> Any:
            return cls.found[backend]

    class Engine(ABC):
        @abstractmethod
        def prepare(self) -> dict[str, Any]: ...
        @classmethod
        @abstractmethod
        def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]) -> Any: ...
        @abstractmethod
        def init_process_group(self, **kwargs: Any) -> None: ...
        @abstractmethod
        def finalize(self) -> None: ...
        @abstractmethod
        async def send_weights(self, weights: Any, global_steps: int | None = None) -> None: ...
        @abstractmethod
        async def receive_weights(self, global_steps: int | None = None) -> Any: ...

    stand_in(monkeypatch, "verl.checkpoint_engine.base", CheckpointEngine=Engine, CheckpointEngineRegistry=Registry)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "verl_engine", raising=False)
    module = import_module("verl_engine")
    named, actor, models = trained()
    engines: list[Any] = []
    for model in models:
        module.set_actor(model, actor, f"file://{tmp_path}/store")
        engines.append(module.ShardplanCheckpointEngine(bucket_size=1, is_master=True))
    module.set_rollout(sp.Weights.load("hf-llama", CONFIG, replica=2, devices=[2, 3]))
    engines += [module.ShardplanCheckpointEngine(bucket_size=1) for _ in range(2)]
    assert module.CheckpointEngineRegistry.get("shardplan") is module.ShardplanCheckpointEngine
    dealt = engines[0].build_topology(2, 2, [e.prepare() for e in engines])
    for k, engine in enumerate(engines):
        engine.init_process_group(**{key: values[k % 2] for key, values in dealt[k // 2].items()})

    async def received(engine: Any, step: int) -> dict[str, Any]:
        return {name: x.clone() async for name, x in engine.receive_weights(global_steps=step)}

    for step in (1, 2):
        found = in_threads(range(4), lambda r, step=step: asyncio.run(
            engines[r].send_weights(None, global_steps=step) if r < 2 else received(engines[r], step)))  # fmt: skip
        for own in (found[2], found[3]):
            assert own.keys() == named.keys() and all(torch.equal(own[n], named[n] * step) for n in named)
        for model in models:
            for x in model.values():
                x.mul_(2)
    for engine in engines:
        engine.finalize()
        engine.transfer.close()


def test_skyrl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @dataclass
    class Info(ABC):
        override_existing_receiver: bool

    class Sender(ABC):
        @abstractmethod
        async def send_chunks(self, chunks: Any, weight_metadata: Any = None) -> None: ...
        @abstractmethod
        def teardown(self) -> None: ...

    class Strategy(ABC):
        @staticmethod
        @abstractmethod
        def create_init_info(ie_cfg: Any, inference_world_size: int | None = None) -> Any: ...
        @staticmethod
        @abstractmethod
        def get_vllm_transfer_engine() -> type: ...
        @staticmethod
        @abstractmethod
        def create_sender(init_info: Any, inference_client: Any) -> Any: ...

    stand_in(monkeypatch, "skyrl.backends.skyrl_train.weight_sync.transfer_strategy", WeightSyncInitInfo=Info,
         WeightTransferSender=Sender, WeightTransferStrategy=Strategy)  # fmt: skip
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "skyrl_strategy", raising=False)
    module = import_module("skyrl_strategy")
    engine_module: Any = import_module("shardplan.interop.torch.refit.engine")
    named, actor, models = trained()
    server = sp.Weights.load("vllm-llama", CONFIG, tensor=2, devices=[2, 3])
    want = sp.refit(sp.Weights.load("hf-llama", CONFIG), server).apply({0: {n: x.numpy() for n, x in named.items()}})
    info = engine_module.transfer_info(actor, server, f"file://{tmp_path}/store")
    held = {r: {n: torch.zeros(s) for n, s, _ in server.parameters(r)} for r in (2, 3)}
    workers = {r: engine_module.TransferEngine(held[r], r) for r in (2, 3)}
    asked = threading.Event()

    class Client:
        async def update_named_weights(self, request: dict[str, Any]) -> None:
            assert request["names"] is None
            asked.set()

    strategy, senders = module.ShardplanStrategy(), []
    for rank, model in enumerate(models):
        module.set_trainer(model, rank, info)
        senders.append(strategy.create_sender(strategy.create_init_info(object(), 2), Client()))

    def work(rank: int) -> None:
        if rank < 2:
            asyncio.run(senders[rank].send_chunks(iter(())))
        else:
            assert asked.wait(60)
            workers[rank].init(senders[0].transfer._info)  # what initialize_receivers carries
            workers[rank].update_weights()
            workers[rank].finish()

    in_threads(range(4), work, 120)
    for rank in (2, 3):
        assert all(torch.equal(held[rank][n], torch.from_numpy(a)) for n, a in want[rank].items())
    for each in senders:
        each.teardown()
    for worker in workers.values():
        worker.close()
