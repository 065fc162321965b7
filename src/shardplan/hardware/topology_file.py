"""The text form of a topology: TOML with unit strings, as in the design; and where presets are found.

Unknown keys are errors. Printing is lossless: every number is written with as many digits as its float needs.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from shardplan.core.registry import entry_points_of
from shardplan.errors import ParseError, TopologyError, excerpt, near_text
from shardplan.hardware.level import DeviceSpec, Hardware, KernelShares, Level
from shardplan.hardware.nccl_xml import parse_nccl_xml
from shardplan.hardware.toml_fields import basic_string, check_keys, parse_quantity
from shardplan.hardware.units import exact, parse_bytes, parse_flops, parse_rate, parse_seconds

_PRESETS = Path(__file__).parent / "presets"
_COUNTED = re.compile(r"(?P<name>[\w-]+?)(?:\s*[,:x*]\s*|\s+)(?:nodes?\s*=\s*)?(?P<nodes>\d+)")  # what people write
_TOP = ("version", "name", "library", "device", "levels")
_DEVICE = ("flops", "memory", "memory_bandwidth", "launch", "kernels", "processors", "issue")
_KERNELS = ("product", "attention", "stream", "half", "queries")
_LEVEL = (
    "name", "size", "link", "bandwidth", "latency", "uplinks", "shape", "source", "efficiency", "degraded", "reduces",
    "rails",
)  # fmt: skip


def presets() -> tuple[str, ...]:
    """Return the names of the topologies that ship with shardplan, sorted; `Topology.load` takes them."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.toml")))


def outside_topologies() -> dict[str, Any]:
    """Return what installed packages bring to the group `shardplan.topologies`, by name.

    Raises `ShardplanError` for an entry point that cannot be loaded, `TopologyError` for one with a preset's name.
    """
    found = entry_points_of("shardplan.topologies")
    for name in set(found) & set(presets()):
        raise TopologyError(f"entry point {name} of shardplan.topologies is named like a preset; legal is another name")
    return found


def load(source: str | Path) -> Hardware:
    """Load a preset, a TOML file or an NCCL topology XML file; see `Topology.load`."""
    path = Path(source)
    if path.suffix not in (".toml", ".xml"):
        if str(source) not in presets():
            known = (*presets(), *outside_topologies())
            if (counted := _COUNTED.fullmatch(str(source))) and counted["name"] in known:
                name, nodes = counted["name"], counted["nodes"]
                raise TopologyError(
                    f"topology {excerpt(str(source))}: how many nodes there are is said apart; legal is {name!r} with "
                    f"nodes={nodes} (on the command line --nodes {nodes})"
                )
            raise TopologyError(
                f"topology {excerpt(str(source))} is no preset and no path to a .toml or .xml file"
                f"{near_text(source, known, 3)}; `shardplan topologies` lists all {len(known)}"
            )
        path = _PRESETS / f"{source}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"topology file {str(source)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ParseError(f"topology file {str(source)!r} is not UTF-8 text") from error
    except ValueError as error:  # a path with a NUL
        raise TopologyError(f"topology file {str(source)!r} cannot be read: {error}") from error
    if path.suffix == ".xml":
        return parse_nccl_xml(text, name=path.stem)
    return parse(text)


def parse(text: str) -> Hardware:
    """Read the text of a topology file; see `Topology.parse`."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ParseError(f"the text of a topology file is read here, got {excerpt(text)}")
    try:
        data = tomllib.loads(text)
    except (RecursionError, ValueError) as error:
        if isinstance(error, tomllib.TOMLDecodeError):
            raise _toml_error(error, text) from error
        raise ParseError("topology is no TOML: it is nested too deeply, or a number is too long") from error
    check_keys("topology", data, _TOP)
    if data.get("version", 1) != 1:
        raise TopologyError(f"topology: version {excerpt(data['version'])} is unknown; this shardplan reads version 1")
    name = _typed_value("topology", data, "name", str, "")
    rows = data.get("levels")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in cast(list[Any], rows)):
        raise TopologyError("topology: at least one [[levels]] table is needed, outermost first")
    levels = [_level(number, row) for number, row in enumerate(cast(list[dict[str, Any]], rows))]
    device = data.get("device", {})
    if not isinstance(device, dict):
        raise TopologyError("topology: device must be a table with the keys " + ", ".join(_DEVICE))
    library = _typed_value("topology", data, "library", str, "ring")
    return Hardware(name, tuple(levels), _device(cast(dict[str, Any], device)), library)


def _toml_error(error: tomllib.TOMLDecodeError, text: str) -> ParseError:
    found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
    reason = re.sub(r" \(at .*\)$", "", str(error))
    if found is None:
        return ParseError(f"topology is no TOML: {reason}", text, len(text))
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    return ParseError(f"topology is no TOML: {reason}", text, starts[int(found[1]) - 1] + int(found[2]) - 1)


_KINDS: dict[Any, str] = {
    str: "a string",
    int: "a whole number",
    (int, float): "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


def _typed_value(where: str, data: dict[str, Any], key: str, kind: Any, default: Any = None) -> Any:
    if key not in data:
        if default is None:
            raise TopologyError(f"{where}: key {key!r} is missing")
        return default
    value = data[key]
    # bool is an int in Python, but not in a topology file.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TopologyError(f"{where}: {key} must be {_KINDS[kind]}, got {excerpt(value)}")
    return value


def _quantity(where: str, data: dict[str, Any], key: str, parser: Callable[[str], float], like: str) -> float:
    value = data.get(key)
    if value is None:
        raise TopologyError(f"{where}: key {key!r} is missing; write it like {key} = {like!r}")
    if not isinstance(value, str):
        raise TopologyError(f"{where}: {key} must be a string with a unit, like {like!r}, got {excerpt(value)}")
    return parse_quantity(f"{where}: {key}", value, parser)


def _level(number: int, data: dict[str, Any]) -> Level:
    name = _typed_value(f"levels[{number}]", data, "name", str)
    where = f"levels[{number}] {name!r}"
    check_keys(where, data, _LEVEL)
    degraded: list[tuple[int, float]] = []
    slow_ports: list[tuple[int, int, float]] = []
    for key, factor in _typed_value(where, data, "degraded", dict, {}).items():
        unit, dot, port = key.partition(".")
        numbered = unit.isdecimal() and (port.isdecimal() if dot else True)
        if not numbered or isinstance(factor, bool) or not isinstance(factor, int | float):
            raise TopologyError(
                f"{where}: degraded maps the number of a child, or of one of its ports, to a factor, as in "
                f'{{ 2 = 0.5, "3.1" = 0.5 }}; got {key} = {excerpt(factor)}'
            )
        if dot:
            slow_ports.append((int(unit), int(port), float(factor)))
        else:
            degraded.append((int(unit), float(factor)))
    shape = _typed_value(where, data, "shape", list, [])
    if not all(isinstance(extent, int) and not isinstance(extent, bool) for extent in shape):
        raise TopologyError(f"{where}: shape must be a list of whole numbers, got {excerpt(shape)}")
    return Level(
        name=name,
        size=_typed_value(where, data, "size", int, math.prod(shape) if shape else None),
        link=_typed_value(where, data, "link", str),
        bandwidth=_quantity(where, data, "bandwidth", parse_rate, "25 GB/s"),
        latency=_quantity(where, data, "latency", parse_seconds, "5 us"),
        uplinks=_typed_value(where, data, "uplinks", int, 1),
        shape=tuple(shape),
        source=_typed_value(where, data, "source", str, ""),
        degraded=tuple(degraded),
        reduces=_typed_value(where, data, "reduces", bool, False),
        efficiency=float(_typed_value(where, data, "efficiency", (int, float), 1.0)),
        slow_ports=tuple(slow_ports),
        rails=_typed_value(where, data, "rails", bool, False),
    )


def _device(data: dict[str, Any]) -> DeviceSpec:
    check_keys("device", data, _DEVICE)
    rates = data.get("flops", {})
    if isinstance(rates, str):
        rates = {"*": rates}
    if not isinstance(rates, dict):
        raise TopologyError(f"device: flops must be a string or a table of dtypes, got {excerpt(rates)}")
    table = cast(dict[str, Any], rates)
    flops = tuple((dtype, _quantity("device: flops", table, dtype, parse_flops, "312 TFLOP/s")) for dtype in table)
    memory, bandwidth, launch = math.inf, math.inf, 0.0
    if "memory" in data:
        memory = _quantity("device", data, "memory", parse_bytes, "80 GB")
    if "memory_bandwidth" in data:
        bandwidth = _quantity("device", data, "memory_bandwidth", parse_rate, "2.0 TB/s")
    if "launch" in data:
        launch = _quantity("device", data, "launch", parse_seconds, "6 us")
    kernels = _typed_value("device", data, "kernels", dict, {})
    check_keys("device: kernels", kernels, _KERNELS)
    shares = {name: float(_typed_value("device: kernels", kernels, name, (int, float), 1.0)) for name in kernels}
    processors = _typed_value("device", data, "processors", int, 0)
    issue = _quantity("device", data, "issue", parse_seconds, "6 us") if "issue" in data else None
    return DeviceSpec(flops, memory, bandwidth, launch, KernelShares(**shares), processors, issue)


def to_text(topology: Hardware) -> str:
    """Print a topology as a file; see `Topology.__str__`."""
    lines = ["version = 1"]
    if topology.name:
        lines.append(f"name = {basic_string(topology.name)}")
    if topology.library != "ring":
        lines.append(f"library = {basic_string(topology.library)}")
    device = topology.device
    if device != DeviceSpec():
        lines.append("[device]")
        if [dtype for dtype, _ in device.flops] == ["*"]:
            lines.append(f'flops = "{exact(device.flops[0][1], "FLOP/s")}"')
        elif device.flops:
            pairs = ", ".join(f'{_key(dtype)} = "{exact(rate, "FLOP/s")}"' for dtype, rate in device.flops)
            lines.append(f"flops = {{ {pairs} }}")
        if math.isfinite(device.memory):
            lines.append(f'memory = "{exact(device.memory, "B")}"')
        if math.isfinite(device.memory_bandwidth):
            lines.append(f'memory_bandwidth = "{exact(device.memory_bandwidth, "B/s")}"')
        if device.launch:
            lines.append(f'launch = "{exact(device.launch, "s")}"')
        if device.issue is not None:
            lines.append(f'issue = "{exact(device.issue, "s")}"')
        if device.processors:
            lines.append(f"processors = {device.processors}")
        plain = KernelShares()
        shares = [f"{x} = {y!r}" for x in _KERNELS if (y := getattr(device.kernels, x)) != getattr(plain, x)]
        if shares:
            lines.append(f"kernels = {{ {', '.join(shares)} }}")
    for level in topology.levels:
        lines += ["[[levels]]", f'name = "{level.name}"', f"size = {level.size}", f'link = "{level.link}"']
        if level.shape:
            lines.append(f"shape = {list(level.shape)}")
        lines += [f'bandwidth = "{exact(level.bandwidth, "B/s")}"', f'latency = "{exact(level.latency, "s")}"']
        if level.uplinks != 1:
            lines.append(f"uplinks = {level.uplinks}")
        if level.source:
            lines.append(f"source = {basic_string(level.source)}")
        if level.efficiency != 1:
            lines.append(f"efficiency = {level.efficiency!r}")
        slow = [f"{unit} = {factor!r}" for unit, factor in level.degraded]
        slow += [f'"{unit}.{port}" = {factor!r}' for unit, port, factor in level.slow_ports]
        if slow:
            lines.append(f"degraded = {{ {', '.join(slow)} }}")
        if level.reduces:
            lines.append("reduces = true")
        if level.rails:
            lines.append("rails = true")
    return "\n".join(lines) + "\n"


def _key(dtype: str) -> str:
    return dtype if re.fullmatch(r"[A-Za-z0-9_-]+", dtype) else basic_string(dtype)
