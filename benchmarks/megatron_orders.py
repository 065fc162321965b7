"""Orders that an audit's fix gives for Megatron, against the `RankGenerator` of megatron-core itself.

`python -m benchmarks.megatron_orders FILE [--count 1000] [--seed 0]`: FILE is `megatron/core/parallel_state.py` of an
installed megatron-core. Of it only `RankGenerator` and the function that it calls are run, which need no torch, and
beside them the two assertions of `initialize_model_parallel` as they stand there. Meshes have two to five axes on two
or four nodes; their placement is drawn, and ranks stand host by host or in a drawn order of nodes.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, record, timed, write

import shardplan as sp
from shardplan.hardware.placement import placements
from shardplan.launches.fixes import fix
from shardplan.launches.launch import Launch

_KEPT = ("RankGenerator", "generate_masked_orthogonal_rank_groups")


def generator_of(path: Path) -> Any:
    """The class `RankGenerator` of a file of megatron-core."""
    tree = ast.parse(path.read_text())
    kept = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in _KEPT]
    names: dict[str, Any] = {}
    head = ast.parse("from __future__ import annotations\nfrom typing import *").body
    code = ast.Module([*head, *kept], [])
    exec(compile(code, str(path), "exec"), names)
    return names["RankGenerator"]


def refusal(generator: Any, order: str, degrees: dict[str, int]) -> str:
    """What `initialize_model_parallel` of megatron-core 0.16.1 raises for an order; empty where it takes it."""
    tp, cp, ep, dp, pp = (degrees.get(n, 1) for n in ("tp", "cp", "ep", "dp", "pp"))
    world = tp * cp * ep * dp * pp
    data, expert = world // (tp * cp * pp), world // (tp * ep * pp)
    try:
        dense = generator(tp=tp, ep=1, dp=data, pp=pp, cp=cp, order=order)
        experts = generator(tp=tp, ep=ep, dp=expert, pp=pp, cp=1, order=order)
        assert order.endswith("pp") or pp == 1 or expert == data, "data parallel sizes differ"
        assert dense.get_ranks("pp") == experts.get_ranks("pp"), "pipelines differ"
    except (AssertionError, RuntimeError) as error:
        return str(error)
    return ""


def drawn(rng: random.Random) -> tuple[Launch, sp.Placement]:
    """A launch, and a placement of its mesh."""
    topology = sp.Topology.load("dgx-h100", nodes=rng.choice((2, 4)))
    names = rng.sample(("tp", "cp", "ep", "dp", "pp"), rng.randint(2, 5))
    sizes = dict.fromkeys(names, 1)
    for _ in range(topology.size.bit_length() - 1):
        sizes[rng.choice(names)] *= 2
    mesh = sp.Mesh(sizes)
    order = list(range(topology.size // 8))
    if rng.random() < 0.5:
        rng.shuffle(order)
    ids = tuple(8 * node + gpu for node in order for gpu in range(8))
    return Launch(mesh, topology, ids), rng.choice(list(placements(mesh, topology)))


def results(path: Path, seed: int, count: int) -> dict[str, Any]:
    """Count what fixes give and what megatron-core refuses."""
    rng, generator, found = random.Random(f"megatron orders {seed}"), generator_of(path), Counter[str]()
    refused: list[str] = []
    for _ in range(count):
        launch, placement = drawn(rng)
        order = fix(launch, placement).megatron_order
        found["an order" if order else "a rankfile"] += 1
        if why := refusal(generator, order or "tp-cp-ep-dp-pp", dict(launch.mesh.shape)):
            refused.append(f"{launch.mesh}: {order}: {why}")
    return {"count": count, "fixes": dict(found), "refused": len(refused), "examples": refused[:10]}


def main() -> None:
    """Draw, count and write."""
    parser = arguments("megatron_orders", __doc__ or "", 1000, of="how many launches")
    parser.add_argument("file", type=Path, help="megatron/core/parallel_state.py of an installed megatron-core")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found, seconds = timed(lambda: results(options.file, options.seed, options.count))
    parameters = {"count": options.count, "seed": options.seed, "megatron-core": _version(options.file)}
    print(found)
    write(options.out, record(parameters, {"seconds": seconds} | found))


def _version(path: Path) -> str:
    """The version of the package that a file is of."""
    text = (path.parent / "package_info.py").read_text()
    return ".".join(text.split(f"{word} = ", 1)[1].split("\n", 1)[0].strip() for word in ("MAJOR", "MINOR", "PATCH"))


if __name__ == "__main__":
    main()
