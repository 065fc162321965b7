"""Files of layouts: what a device holds is what the core's own reference gives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.reference import distribute
from shardplan.core.tensor import TensorType
from shardplan.interop.checkpoint.layouts import layout_weights
from shardplan.movement.weights.refit import refit

LAYOUTS = ("[@(data, tensor), _]", "[@(tensor, data), _]", "[_, @(data, tensor)]", "[@tensor, @data]", "[_, _]")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dim_that_several_axes_cut_is_that_of_the_reference(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "layouts.toml"
    path.write_text(f'mesh = {{ data = 2, tensor = 3 }}\n[layouts]\n"w" = "{layout}"\n')
    tensors = {"w": ((12, 6), "f32")}
    x = np.arange(72, dtype=np.float32).reshape(12, 6)
    found = refit(layout_weights(None, tensors), layout_weights(path, tensors)).apply({0: {"w": x}})
    wanted = distribute(x, TensorType("f32", x.shape, Layout.parse(layout).dims, Mesh(data=2, tensor=3)))
    assert len(found) == 6
    for rank, shard in enumerate(wanted):
        np.testing.assert_array_equal(found[rank]["w"], shard)
