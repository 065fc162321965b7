"""Hardware: what the cluster is, how a mesh lies on it, and what communication costs there.

Reading order:

- `units`          unit strings such as "25 GB/s", parsed to SI floats and printed
- `level`          `Level` and `DeviceSpec`: how the children of one parent are linked, what one device can do
- `nccl_xml`       NCCL topology XML as levels
- `toml_fields`    what files of topologies and of libraries share
- `topology_file`  the TOML form, and the presets in `presets/*.toml`
- `topology`       `Topology`: levels, outermost first, and the device at their leaves
- `digit_order`    the order in which axes share a level: which dims of a torus they lie on
- `placement`      `Placement`: the matrix of arXiv 2110.10548; enumeration and counting
- `recognise`      an existing mesh as a placement
- `level_factors`  what a placement makes of the axes of a reduction, level by level
- `prices/`        what communication costs: `fabric` (resources and loads), `aggregate` and `algorithms` (loads of
                   collectives, counted or as flows), `library` (tables of rows), `traffic` (hops and loads of an
                   algorithm), `gloo_messages` (those of gloo), `link_loads` (rings and tori), `kernels` (the price of
                   a kernel), `cost` (the price of a pattern), `group_loads` (its groups one by one), `critical_path`
                   (when steps run), `fused` (a computation whose tiles leave as soon as they are there) and
                   `fused_kernels` (what that computation takes)
- `measured/`      what others measured: `samples` and `nccl_log` (files), `sample_setup` (topology and pattern of a
                   sample), `fitting` (tables fitted to samples)

This room imports `core` and the errors, and numpy.
"""

from shardplan.hardware.level import DeviceSpec, Level, Link
from shardplan.hardware.nccl_xml import parse_nccl_xml
from shardplan.hardware.placement import Matrix, Placement, count, orders, placements
from shardplan.hardware.prices.affine_costs import linear_cost
from shardplan.hardware.prices.cost import Price, price, seconds
from shardplan.hardware.prices.fabric import Fabric, Flows
from shardplan.hardware.recognise import matrix_of
from shardplan.hardware.topology import Topology
from shardplan.hardware.topology_file import presets
from shardplan.hardware.units import (
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_seconds,
)

__all__ = [
    "Topology",
    "Level",
    "Link",
    "DeviceSpec",
    "presets",
    "parse_nccl_xml",
    "Placement",
    "Matrix",
    "placements",
    "orders",
    "count",
    "matrix_of",
    "Fabric",
    "Flows",
    "Price",
    "price",
    "seconds",
    "linear_cost",
    "parse_bytes",
    "parse_rate",
    "parse_seconds",
    "parse_flops",
    "format_bytes",
    "format_rate",
    "format_seconds",
]
