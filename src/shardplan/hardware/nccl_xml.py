"""NCCL topology XML, the file that `NCCL_TOPO_DUMP_FILE` names, as a topology of two levels: node and gpu.

Read: the number of GPUs, their NVLinks (or the PCI link of each GPU where there are none), and the network ports with
their speeds. Bandwidth per NVLink and PCI lane are NCCL's own constants (NVIDIA/nccl, `src/graph/topo.h`:
`SMxx_NVLINK_BW`, `PCI_BW`; `src/graph/topo.cc`: `kvDictPciGen`, bandwidth = width * speed / 80 GB/s). The library is
`nccl`; launch and the latency of a hop over NVLink are those of the GPU's generation, fitted with its table, a hop over
PCI takes twice that (`src/graph/tuning.cc`: 1.0 and 0.5 us under LL), and the network's latency is the default of
`systems.toml` where the file says none. Point-to-point NVLinks (no switch) become a switch of the same bandwidth per
GPU. The file holds one node, so `node` has size 1 until it is set.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from shardplan.errors import ParseError, TopologyError
from shardplan.hardware.level import DeviceSpec, Hardware, Level

# GB/s of one NVLink and direction by compute capability (NVIDIA/nccl, src/graph/topo.h).
_NVLINK = ((100, 40.1), (90, 20.6), (86, 12.0), (70, 20.0), (60, 18.0))
# Rate of one lane in 100 Mbit/s, by the transfer rate that the kernel states (NVIDIA/nccl, kvDictPciGen).
_PCI_LANE = {"2.5": 15, "5": 30, "8": 60, "16": 120, "32": 240, "64": 480}
_LANES = 80  # times 100 Mbit/s are 1 GB/s
_PCI_DEFAULT = 12e9  # bytes per second where the file does not say, or says what is in no table (PCI_BW)
_PCI_WIDTH = 16.0  # lanes where it does not say
# Launch and latency of a hop over NVLink by compute capability, as the presets of these generations have them.
_GENERATIONS = ((100, 8.2e-6, 1.24e-6), (90, 5.2e-6, 0.86e-6), (80, 9.5e-6, 0.99e-6), (0, 7.1e-6, 1.16e-6))
_PCI_HOP = 2.0  # hops over NVLink that one over PCI takes
_NET = 9e-6


def parse_nccl_xml(text: str, name: str = "nccl") -> Hardware:
    """Return what the text of an NCCL topology XML file says: the levels node (size 1) and gpu.

    There is only gpu when the file has no network port.

    Raises:
        ParseError: Malformed XML, another root than `<system>`, or an attribute that is missing or no number.
        TopologyError: The file names no GPU.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        line, column = error.position
        starts = [0, *(match.end() for match in re.finditer("\n", text))]
        position = min(starts[min(line, len(starts)) - 1] + column, len(text))
        reason = str(error).split(":")[0]
        raise ParseError(f"NCCL topology is malformed XML: {reason}", text, position) from error
    if root.tag != "system":
        raise ParseError(f"NCCL topology: the root element is <{root.tag}>, expected <system>", text, text.find("<"))
    gpus = [(gpu, pci) for pci in root.iter("pci") for gpu in pci.findall("gpu")]
    if not gpus:
        raise TopologyError(f"NCCL topology {name!r} names no <gpu>; a dump of a machine with GPUs is needed")
    rates = [_gpu_rate(text, gpu, pci) for gpu, pci in gpus]
    kinds = {kind for _, kind in rates}
    kind = "pci" if "pci" in kinds else "nvlink"
    # The slowest GPU speaks for all: levels are uniform, and a collective waits for it.
    bandwidth = min(rate for rate, how in rates if how == kind)
    capability = min(_number(text, gpu, "sm", 0.0) for gpu, _ in gpus)
    launch, hop = next((launch, hop) for least, launch, hop in _GENERATIONS if capability >= least)
    hop *= _PCI_HOP if kind == "pci" else 1.0
    device = DeviceSpec(launch=launch)
    inner = Level("gpu", len(gpus), "switch", bandwidth, hop, source=f"NCCL topology XML, {kind}")
    nets = [net for net in root.iter("net") if _number(text, net, "speed") > 0]
    if not nets:
        return Hardware(name, (inner,), device, "nccl")
    speed = min(_number(text, net, "speed") for net in nets) * 1e6 / 8  # Mbit/s in the file
    latency = max(_number(text, net, "latency", 0.0) for net in nets) * 1e-6 or _NET  # microseconds there
    outer = Level("node", 1, "switch", speed, latency, uplinks=len(nets), source="NCCL topology XML, net")
    return Hardware(name, (outer, inner), device, "nccl")


def _gpu_rate(text: str, gpu: ElementTree.Element, pci: ElementTree.Element) -> tuple[float, str]:
    """The bytes per second of a GPU's links, and which links these are: nvlink or pci."""
    links = sum(_number(text, link, "count") for link in gpu.findall("nvlink"))
    if links:
        capability = _number(text, gpu, "sm")
        for least, rate in _NVLINK:
            # 86 to 89 are consumer and inference parts; 80 has the links of 70.
            if capability >= least:
                return links * rate * 1e9, "nvlink"
        raise ParseError(f"NCCL topology: <gpu sm={capability:g}> has NVLinks of unknown speed; known: sm 60 and above")
    speed = re.match(r"\s*(\d+(?:\.\d+)?)", pci.get("link_speed", ""))
    if speed is None:
        return _PCI_DEFAULT, "pci"
    lane = _PCI_LANE.get(f"{float(speed[1]):g}")
    width = _number(text, pci, "link_width", _PCI_WIDTH) or _PCI_WIDTH
    return (_PCI_DEFAULT if lane is None else width * lane / _LANES * 1e9), "pci"


def _number(text: str, element: ElementTree.Element, key: str, default: float | None = None) -> float:
    """A non-negative number of an element; a `ParseError` points into the text of the file."""
    value = element.get(key)
    if value is None and default is not None:
        return default
    try:
        number = float(value or "")
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        what = "is missing" if value is None else f"is {value!r}, not a number"
        position = text.find(f'{key}="{value}"') if value is not None else text.find(f"<{element.tag}")
        raise ParseError(f"NCCL topology: attribute {key!r} of <{element.tag}> {what}", text, max(position, 0))
    return number
