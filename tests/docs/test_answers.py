"""Each question has one answer: the table of `docs/walk.md` names functions, and what they replaced is gone."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardplan"
TABLE = (ROOT / "docs" / "walk.md").read_text().partition("## One question, one answer")[2]
ROW = re.compile(r"^\| [^|]+\? \| `([\w/]+\.py)` `(\w+)`(.*?)\|", re.MULTILINE)

# Second answers that are no more, by module, or class of one: nobody is to bring one back under its name.
GONE = {
    "plans.nominal": ("nominal_seconds", "nominal_steps", "nominal_windows", "BANDWIDTH", "LATENCY"),
    "simulation.closed.numbers": ("KernelPrice",),
    "simulation.closed.links": ("LevelRates",),
    "hardware.level:DeviceSpec": ("kernel_seconds",),
    "simulation.closed.form:ClosedForm": ("bounded",),
    "movement.redistribution.reducing_candidates": ("_reduction",),
    "strategy.schedules.run": ("ListRun", "post_groups"),
    "strategy.schedules.check": ("consumers",),
    "strategy.partition.job_order": ("way",),
    "simulation.jobs.compiled_job": ("message_pass",),
    "simulation.sweep.graph": ("ActionGraph", "levelled"),
    "simulation.sweep.pass_lists": ("PassLists",),
    "simulation.sweep.message_graph": ("graph_of_placed",),
    "simulation.closed.serving": ("serving", "_passes"),
    "simulation.jobs.periods": ("shorter", "spans"),
    "simulation.closed.memory": ("in_flight", "buffers", "LOGIT", "SCORE", "MASKS", "_staying"),
}
# Who reads the rate or the latency of a link, outside `hardware`, and for what: nobody makes a price of them.
READERS = {
    "execution/lab/cluster.py": "shapes real links so",
    "execution/lab/experiments.py": "says what was shaped",
    "execution/lab/validate.py": "says what was shaped",
    "launches/causes.py": "says which links are short",
    "plans/collective_bounds.py": "a lower bound",
    "plans/nominal.py": "a lower bound",
    "report/measurements.py": "prints it",
    "report/timeline.py": "prints it",
    "simulation/replay.py": "message by message, as the lab's engine runs",
    "simulation/searching/sensitivity.py": "another topology, to see what it changes",
    "simulation/switch_tree.py": "message by message, as the lab's engine runs",
}
READ = re.compile("bandwidth|delivered_rate|latency|latencies")
# What makes runs of schedules and prices of kernels: whoever else calls one answers a question of the table again.
CALLERS = {
    "kernel_seconds": {"hardware/prices/cost.py", "hardware/prices/kernels.py", "simulation/closed/numbers.py"},
    "ActionGraph": {"strategy/schedules/action_graph.py"},
    "levelled": {"strategy/schedules/action_lists.py"},
    "ActionEdges": {"strategy/schedules/action_lists.py"},
    "StreamRun": {"simulation/jobs/maps.py", "simulation/jobs/streams.py"},
    "propagate_axes": {"simulation/closed/reading.py"},
}


def test_every_answer_is_a_function() -> None:
    rows = ROW.findall(TABLE)
    assert len(rows) >= 8
    for path, first, more in rows:
        module = importlib.import_module(f"shardplan.{path[:-3].replace('/', '.')}")
        also = re.findall(r"`(\w+)`", more) if "as lines" in more else []
        for name in (first, *also):
            assert callable(getattr(module, name)), (path, name)


@pytest.mark.parametrize("where", GONE)
def test_what_it_replaced_is_gone(where: str) -> None:
    module, _, owner = where.partition(":")
    try:
        found = importlib.import_module(f"shardplan.{module}")
    except ModuleNotFoundError:
        return
    held = getattr(found, owner) if owner else found
    assert [name for name in GONE[where] if hasattr(held, name)] == []


def test_nobody_else_runs_a_schedule_or_prices_a_kernel() -> None:
    found: dict[str, set[str]] = {name: set() for name in CALLERS}
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for name in _asked(ast.parse(text)) & CALLERS.keys() if any(name in text for name in CALLERS) else ():
            found[name].add(str(path.relative_to(SOURCE)))
    assert found == CALLERS


def test_every_way_of_asking_is_seen() -> None:
    ways = (
        "levelled(x)", "from m import levelled", "from m import levelled as f", "import a.b\na.b.levelled(x)",
        "from a import b\nmap(b.levelled, x)", "from m import ActionGraph as G\nG(x)", "import m\nm.ActionGraph(x)",
    )  # fmt: skip
    assert [bool(_asked(ast.parse(way)) & CALLERS.keys()) for way in ways] == [True] * len(ways)
    others = "from m import ActionGraph\ndef f(x: ActionGraph, row: C) -> None:\n    row.serving(x.levelled)"
    assert not _asked(ast.parse(others)) & CALLERS.keys()


def _asked(tree: ast.Module) -> set[str]:
    """The names that a module calls, bare, renamed, or as what a module has; of functions also what it only imports.

    A class may be imported for signatures alone, and what another object has by such a name is another thing.
    """
    nodes = list(ast.walk(tree))
    imports = [a for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for a in node.names]
    given = {a.asname or a.name.partition(".")[0]: a.name for a in imports}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    owned = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _root(node) in given}
    functions = {name for name in given.values() if not name[:1].isupper()}
    return {given.get(name, name) for name in called} | owned | functions


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_nobody_else_reads_the_links() -> None:
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "hardware" not in path.relative_to(SOURCE).parts and READ.search(text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and READ.fullmatch(node.attr) and _of_a_link(node)
    }
    assert found == set(READERS)


def _of_a_link(node: ast.Attribute) -> bool:
    """Whether it is an attribute of a level, a link or a fabric: requests and accounts have others of these names."""
    owner = ast.unparse(node.value)
    return not re.fullmatch(r"out|p|self|inner|entry|books|constants", owner)
