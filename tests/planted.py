"""Faults planted in the package, one at a time, and the tests that must then fail.

`faults/` lists them, a file a room: the function that is altered (`in`), a piece of its source that stands there once
(`old`), what stands there instead (`new`), what that is (`says`), and the tests that must fail then (`tests`). A fault
is planted in a forked child: its function is compiled again from the altered source and takes the place of the old
one's code, so that everybody who imported it has it; then pytest runs the tests there. Processes that they launch have
the fault, too (`planting/`).

`python -m tests.planted` (`make faults`) tries all of them and lists those that survive; names select some. The tests
try a share of them, which turns with the commit.
"""

from __future__ import annotations
import __future__

import ast
import gc
import inspect
import io
import json
import os
import subprocess
import sys
import textwrap
import tomllib
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import astuple, dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent
CAUGHT, SURVIVED, NOT_RUN = 0, 1, 2
SERVE = "--serve"
# Without the plugin that collects all garbage, five times, at the end: of a child whose memory goes away as a whole.
PLUGINS = ("no:cacheprovider", "no:xdist", "no:unraisableexception")
OPTIONS = ("-x", "-q", "--no-header", "--tb=line", *(word for name in PLUGINS for word in ("-p", name)))


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `name` is the module and the qualified name of a function."""

    name: str
    says: str
    old: str
    new: str
    tests: tuple[str, ...]


def listed() -> tuple[Fault, ...]:
    """Return the faults of the tables, room by room."""
    tables = sorted((Path(__file__).parent / "faults").glob("*.toml"))
    raw = [f for table in tables for f in tomllib.loads(table.read_text())["fault"]]
    return tuple(Fault(f["in"], f["says"], f["old"], f["new"], tuple(f["tests"].split())) for f in raw)


def function_of(name: str) -> tuple[FunctionType, ModuleType]:
    """Return a function and its module, the plain one behind a method, a property, or a cached or decorated function.

    Raises `LookupError` where there is none of that name.
    """
    parts = name.split(".")
    for k in range(len(parts) - 1, 0, -1):
        try:
            module = import_module(".".join(parts[:k]))
        except ModuleNotFoundError:
            continue
        found: Any = module
        for part in parts[k:]:
            found = inspect.getattr_static(found, part, None)
        while found is not None and not isinstance(found, FunctionType):
            found = next((getattr(found, a) for a in ("fget", "__func__", "__wrapped__") if hasattr(found, a)), None)
        if found is not None:
            return found, module
        break
    raise LookupError(f"a fault is in {name}, which is no function of the package")


def altered(fault: Fault) -> str:
    """Return the source of the function with the fault in it; raises `LookupError` where `old` is not there once."""
    source = textwrap.dedent(inspect.getsource(function_of(fault.name)[0]))
    if (count := source.count(fault.old)) != 1:
        raise LookupError(f"a fault's old {fault.old!r} stands {count} times in {fault.name}, not once")
    return source.replace(fault.old, fault.new)


def code_of(source: str, function: FunctionType, module: ModuleType) -> CodeType:
    """Compile the altered source of a function, with the free variables that it had."""
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list = []
    body: list[ast.stmt] = [node]
    if free := function.__code__.co_freevars:  # they are free only inside another function
        maker = ast.parse(f"def make({', '.join(free)}): ...").body[0]
        assert isinstance(maker, ast.FunctionDef)
        maker.body, body = body, [maker]
    whole = ast.fix_missing_locations(ast.Module(body, []))
    made = compile(whole, module.__file__ or "?", "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    while made.co_name != node.name:
        made = next(c for c in made.co_consts if isinstance(c, CodeType) and c.co_name in ("make", node.name))
    return made


def plant(fault: Fault) -> None:
    """Alter the package in this process, and forget whatever it has remembered."""
    function, module = function_of(fault.name)
    function.__code__ = code_of(altered(fault), function, module)
    for other in package():
        for value in (*vars(other).values(), *(m for c in vars(other).values() for m in members(c))):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def pass_on(fault: Fault) -> None:
    """Have the fault planted in the Python processes that this one launches, too: see `planting/sitecustomize.py`."""
    start = subprocess.Popen.__init__

    def having(env: Any) -> dict[str, str]:
        paths = (str(ROOT / "tests" / "planting"), env.get("PYTHONPATH", ""))
        return dict(env) | {"PLANTED": json.dumps(astuple(fault)), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def launch(self: Any, *args: Any, env: Any = None, **more: Any) -> None:
        start(self, *args, env=None if env is None else having(env), **more)

    os.environ.update(having(os.environ))  # what multiprocessing starts has it, and what is given no variables
    subprocess.Popen.__init__ = launch


def members(value: Any) -> tuple[Any, ...]:
    """Return what a class of the package holds."""
    return tuple(vars(value).values()) if inspect.isclass(value) and value.__module__.startswith("shardplan") else ()


def package() -> list[ModuleType]:
    """Return the modules of the package that are loaded."""
    return [m for name, m in sys.modules.items() if name.split(".")[0] == "shardplan"]


def outcome(fault: Fault) -> tuple[int, str]:
    """Plant a fault in a forked child and run its tests there: what came of it, and what pytest printed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        status, said = NOT_RUN, io.StringIO()
        try:
            with redirect_stdout(said), redirect_stderr(said):
                os.chdir(ROOT)
                plant(fault)
                pass_on(fault)
                tests = [str(ROOT / t) for t in fault.tests]
                ended = pytest.main([*OPTIONS, *tests])
                status = {pytest.ExitCode.OK: SURVIVED, pytest.ExitCode.TESTS_FAILED: CAUGHT}.get(ended, NOT_RUN)
        except LookupError as error:
            said.write(str(error))
        except BaseException:
            said.write(traceback.format_exc())
        with os.fdopen(writer, "w") as pipe:
            pipe.write(said.getvalue()[-20_000:])
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said_there = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said_there


class Server:
    """A process of its own that tries faults: one that has threads, as those of JAX, must not be forked."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.planted", SERVE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def outcome(self, fault: Fault) -> tuple[int, str]:
        """Do what `outcome` does, there."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(astuple(fault)).encode() + b"\n")
        self.process.stdin.flush()
        status, said = json.loads(self.process.stdout.readline())
        return status, said

    def close(self) -> None:
        """End the process, which reads to the end of its input."""
        self.process.communicate()


def loaded() -> None:
    """Load the whole package, which the children then need not; their garbage collector leaves it alone.

    Of laws only whether they fail is asked: no example is made small.
    """
    import_module("conftest").load_package()
    settings.load_profile("planted")
    gc.freeze()


def serve() -> None:
    """Try each fault that a line of the input holds, and answer with a line."""
    loaded()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests and their processes print is no answer
    for line in sys.stdin:
        name, says, old, new, tests = json.loads(line)
        print(json.dumps(outcome(Fault(name, says, old, new, tuple(tests)))), file=answers, flush=True)


def main(chosen: list[str]) -> int:
    """Try the faults and print what became of each; returns how many were not caught."""
    loaded()
    faults = [f for f in listed() if not chosen or any(c in f.name or c in f.says for c in chosen)]
    left = 0
    for fault in faults:
        status, said = outcome(fault)
        word = {CAUGHT: "caught", SURVIVED: "SURVIVED"}.get(status, "NOT RUN")
        print(f"{word:9} {fault.name}: {fault.says}", flush=True)
        if status not in (CAUGHT, SURVIVED):
            print(textwrap.indent(said[-1500:], "    "), flush=True)
        left += status != CAUGHT
    print(f"{len(faults)} faults, {left} not caught")
    return left


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    sys.exit(serve() if sys.argv[1:] == [SERVE] else bool(main(sys.argv[1:])))
