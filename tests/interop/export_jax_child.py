"""Exports of every case on eight CPU devices beside the reference; prints one JSON object."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from export_cases import RANKS, cases

from execution.jax_child import QUICK

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RANKS} {QUICK}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from shardplan.interop.exports.jax import bind_reduction, jax_text
from shardplan.interop.exports.recipe import recipe


def main() -> None:
    wrong: list[str] = []
    names: dict[str, int] = {}
    for case in cases():
        text: dict = {}
        exec(compile(jax_text(case.program, case.placement), "<exported>", "exec"), text)
        bound = bind_reduction(case.program)
        rows = case.payloads()
        want = case.expected()
        r = recipe(case.program)
        # Devices that differ only along axes of one result have the same row of the result.
        places = np.arange(len(r.ranks)).reshape(r.sizes)
        first = places[tuple(slice(None) if n in r.differs else 0 for n in r.names)].reshape(-1)
        placed = recipe(case.program, case.placement).ranks
        for way, run, mesh, ranks in (
            ("bound", bound, bound.mesh, r.ranks),
            ("text", text["reduce_rows"], text["MESH"], placed),
        ):
            got = run(rows)
            if [d.id for d in mesh.devices.flat] != list(ranks) or mesh.axis_names != r.names:
                wrong.append(f"{case.name}, {way}: the mesh is {mesh}")
            shards = {s.device.id: np.asarray(s.data)[0] for s in got.addressable_shards}
            if len(got) != len(first):
                wrong.append(f"{case.name}, {way}: {len(got)} rows for {len(first)}")
            for k, value in enumerate(want):
                mine = shards[ranks[k]]
                if value is None:
                    value = np.zeros_like(mine)
                if not np.array_equal(mine, value):
                    wrong.append(f"{case.name}, {way}, place {k}: {mine[:6].tolist()} for {value[:6].tolist()}")
        for word in ("all-gather(", "all-reduce(", "reduce-scatter("):
            names[word] = names.get(word, 0) + bound.mapped.lower(rows).compile().as_text().count(word)
    print(json.dumps({"wrong": wrong, "devices": len(jax.devices()), "compiled": names}))


if __name__ == "__main__":
    main()
