"""A trainer's weights in the models of vLLM's workers, by `examples/vllm_engine.py` and vLLM's own factory of engines.

The trainer is one process with a checkpoint of transformers in memory, the workers are ranks with vLLM's model. What
the engine wrote is compared, bit for bit, with what the model's own `load_weights` makes of the checkpoint.
"""

from __future__ import annotations

import importlib
import multiprocessing
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.loaders import vllm
from benchmarks.loaders.cases import LLAMA, MOE, LoaderCase

import shardplan as sp
from shardplan.interop.derivation.forked_ranks import Parameters, fork_ranks
from shardplan.interop.torch.refit.engine import TransferEngine, transfer_info

torch: Any = importlib.import_module("torch")
sys.path.append(str(Path(__file__).parents[2] / "examples"))
importlib.import_module("vllm_engine")
factory: Any = importlib.import_module("vllm.distributed.weight_transfer").WeightTransferEngineFactory
config: Any = importlib.import_module("vllm.config")
chosen: Any = importlib.import_module("vllm.config.weight_transfer").WeightTransferConfig(backend="shardplan")

CASES = (
    LoaderCase("hf-llama", "vllm-llama", LLAMA, "", {"tensor": 4}),
    LoaderCase("hf-llama", "vllm-llama", LLAMA, "", {"tensor": 2, "pipeline": 2, "stages": [2, 1]}),
    LoaderCase("hf-qwen3-moe", "vllm-qwen3-moe-ep", MOE, "", {"tensor": 4}),
)


def refitted(case: LoaderCase) -> dict[str, Any]:
    """Move weights to all workers twice, and compare; return a row."""
    sizes: Any = dict(case.sizes)
    ranks, degrees = case.ranks, dict(case.degrees)
    trainer = sp.Weights.load(case.source, sizes, dtype="f32", devices=[100])
    server = sp.Weights.load(case.target, sizes, dtype="f32", devices=range(ranks), **degrees)
    rng = np.random.default_rng(0)
    named = {name: rng.random(shape, dtype=np.float32) for name, shape, _ in trainer.parameters(100)}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    info = transfer_info(trainer, server, f"tcp://127.0.0.1:{port}", timeout=120)

    def train() -> None:
        end = TransferEngine({n: torch.from_numpy(a.copy()) for n, a in named.items()}, 100)
        end.init(info)
        for version in (1, 2):
            end.update_weights(version=version)
            end.finish()
        end.close()

    with tempfile.TemporaryDirectory() as folder:
        vllm.described(case, Path(folder))

        def work(rank: int) -> Parameters:
            said = vllm.engine(case, folder)
            with config.set_current_vllm_config(said):
                model = vllm.empty(case, said, rank)
                model.load_weights((n, torch.from_numpy(a.copy())) for n, a in named.items())
                wanted = {n: p.detach().clone() for n, p in model.named_parameters()}
                end = factory.create_engine(chosen, said, torch.device("cpu"), model)
                end.init_transfer_engine(end.parse_init_info({"info": info}))
                equal = True
                for version in (1, 2):
                    for parameter in model.parameters():
                        parameter.data.zero_()
                    end.start_weight_update()
                    end.receive_weights(end.parse_update_info({"version": version}))
                    end.finish_weight_update()
                    equal &= all(torch.equal(p, wanted[n]) for n, p in model.named_parameters())
                end.shutdown()
            return {"equal": np.array(equal), "parameters": np.array(len(wanted))}

        process = multiprocessing.get_context("fork").Process(target=train)
        process.start()
        try:
            done = fork_ranks(ranks, work)
        finally:
            process.join(10)
            process.kill()
    return {
        "table": case.target, "from": case.source,
        "degrees": " ".join(f"{k}={v}" for k, v in case.degrees.items()),
        "parameters": int(sum(d["parameters"] for d in done.values())),
        "found": "equal" if all(d["equal"] for d in done.values()) and process.exitcode == 0 else "differ",
    }  # fmt: skip
