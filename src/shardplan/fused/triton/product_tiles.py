"""Which tile a product's kernel has: `choose_tile`, from a table that is made offline (`product_tiles.toml`).

Ranks never time anything themselves, so that all choose alike. A shape that was timed has the tile that was best;
another one that which leaves the least to the busiest processor, with one program each: a program keeps its processor
from the first tile to the last, and fetches the next steps' operands while it multiplies.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from shardplan.errors import optional

if TYPE_CHECKING:
    import torch

EDGE = 32  # what a row or column of a tile's operands costs, in products of a step; assumed, not measured
STEP = 64  # a multiple of every tile's step along the depth
TABLE = "product_tiles.toml"


class ProductTile(NamedTuple):
    """A tile: rows, columns and the step along the depth; warps, stages of the pipeline, and whether it is described.

    A described tile's operands are fetched by the hardware (TMA), by descriptors that the host makes.
    """

    block: tuple[int, int, int]
    warps: int = 8
    stages: int = 3
    described: bool = False

    @property
    def names(self) -> dict[str, int]:
        """The kernels' constants."""
        return dict(zip(("block_m", "block_n", "block_k"), self.block, strict=True))

    def operands(self, a: torch.Tensor, b: torch.Tensor, products: int) -> tuple[dict[str, bool], tuple[Any, Any]]:
        """Return whether a [rows, K] and b [products, K, N] are described, and the two as a kernel takes them."""
        if not (self.described and can_describe(a, b, products)):
            return {"described": False}, (a, b)
        deep, wide = a.shape[1], b.shape[-1]
        make = optional("triton.tools.tensor_descriptor", "triton").TensorDescriptor
        m, n, k = self.block
        return {"described": True}, (
            make(a, list(a.shape), [deep, 1], [m, k]),
            make(b, [products * deep, wide], [wide, 1], [k, n]),
        )


def can_describe(a: torch.Tensor, b: torch.Tensor, products: int) -> bool:
    """Return whether a [rows, K] and b [products, K, N] may be described.

    Descriptors want 16 bytes of addresses and of rows; a step that reads behind a product's depth, that nothing lies
    there, not even the next product.
    """
    deep, wide, width = a.shape[1], b.shape[-1], a.dtype.itemsize
    even = deep * width % 16 == wide * width % 16 == a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    return even and (products == 1 or deep % STEP == 0) and bool(a.numel() and b.numel())


MIDDLE = ProductTile((128, 128, 64))


@cache
def product_table() -> dict[str, list[dict[str, Any]]]:
    """Return the table: `tile`, what may be chosen, and `timed`, what was best for shapes."""
    return tomllib.loads(files("shardplan.fused.triton").joinpath(TABLE).read_text())


def tiles_of(target: str, width: int) -> list[ProductTile]:
    """Return the tiles of a target (`cuda`, `hip`, or `cpu`, the interpreter's) for operands of so many bytes."""
    return [_tile(row) for row in product_table()["tile"] if (row["target"], row["bytes"]) == (target, width)]


def _tile(row: dict[str, Any]) -> ProductTile:
    return ProductTile(tuple(row["block"]), row["warps"], row["stages"], row["described"])


def power_of_two(n: int) -> int:
    """Return the power of two from n on: numbers of rows of one such class have the same tile.

    >>> [power_of_two(n) for n in (0, 1, 5, 64, 65)]
    [1, 1, 8, 64, 128]
    """
    return 1 << (max(1, n) - 1).bit_length()


@cache
def choose_tile(
    target: str, width: int, describable: bool, processors: int, blocks: int, rows: int, columns: int, depth: int
) -> ProductTile:
    """Return the tile for `blocks` products of [rows, depth] by [depth, columns] in one launch, of operands of `width`.

    Where operands are describable it is a described one, if the target has such. Give `power_of_two` of rows, which
    data may decide. The work of the busiest processor is its tiles, whole ones, each its numbers and `EDGE` times its
    edges; of equals the larger tile, which is first in the table.
    """
    shape = [power_of_two(n) for n in (rows, columns, depth)]
    for row in product_table().get("timed", ()):
        asked = [target, width, describable, blocks, *shape]
        if [row["target"], row["bytes"], row["described"], row["blocks"], *row["shape"]] == asked:
            return _tile(row)

    def busiest(tile: ProductTile) -> int:
        m, n, _ = tile.block
        each = -(-(blocks * -(-rows // m) * -(-columns // n)) // processors)
        return each * (m * n + EDGE * (m + n))

    every = tiles_of(target, width)
    found = [tile for tile in every if tile.described and describable]
    return min(found or [tile for tile in every if not tile.described], key=busiest)
