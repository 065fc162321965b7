"""Run under mpiexec on four ranks, of which rank 2 does something wrong; rank 0 prints one JSON object at the end.

Timeouts follow the machine: each is at least what was asked for, and at least `PACE` times what a healthy run takes.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import shardplan as sp  # noqa: E402
from shardplan.core.ops import AllGather, Permute, Reduce  # noqa: E402
from shardplan.core.program import Program  # noqa: E402
from shardplan.core.step import Step  # noqa: E402
from shardplan.execution.mpi import agreed_programs as mpi_agreed  # noqa: E402
from shardplan.execution.mpi import run as mpi  # noqa: E402
from shardplan.execution.mpi import steps as mpi_steps  # noqa: E402
from shardplan.execution.mpi.letters import letters as world_letters  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK = WORLD.Get_rank()
ODD = RANK == 2
PACE = 30
LONG = 600.0  # seconds, where nobody should have to wait


def gathers(rows: int) -> Program:
    t = sp.TensorType.parse(f"i32[{rows}@x, 4]", sp.Mesh(x=4))
    steps = [Step(AllGather(0, ("x",)), ("0",), ("1",)), Step(AllGather(1, ("x",)), ("2",), ("3",))]
    return Program({"0": t, "2": sp.TensorType("i32", (4, 8), (None, "x"), t.mesh)}, steps, ("1", "3"))


def chain() -> Program:
    t = sp.TensorType.parse("i32[65536]{+x}", sp.Mesh(x=4))
    return Program({"0": t}, [Step(Reduce(("x",)), ("0",), ("1",))], ("1",))


def turned(first: str, then: str) -> Program:
    """Blocks of a type move to other devices, as messages."""
    mesh = sp.Mesh(a=2, b=2)
    t, u = (sp.TensorType.parse(text, mesh) for text in (first, then))
    return Program({"0": t}, [Step(Permute(u.layout), ("0",), ("1",))], ("1",))


def inputs_of(program: Program, fill: int = 1):
    return [[np.full(t.local_shape(RANK), fill + RANK, np.int32)] for t in program.input_types]


def attempt(program: Program, timeout: float, inputs=None, fill: int = 1):
    """Run, and say what came of it and when: whether it equals the reference, or the error."""
    begun = time.monotonic()
    try:
        got = mpi.run_program(program, inputs_of(program, fill) if inputs is None else inputs, timeout=timeout)
    except sp.errors.ShardplanError as error:
        return {"error": f"{type(error).__name__}: {error}", "begun": begun, "at": time.monotonic()}
    whole = [
        [np.full(t.local_shape(k), fill + k, np.int32) for k in range(4)]
        for t in program.input_types
    ]  # fmt: skip
    expected = sp.run(program, whole if len(whole) > 1 else whole[0])
    expected = expected if len(whole) > 1 else [expected]
    return {"same": all(np.array_equal(x[0], want[RANK]) for x, want in zip(got, expected, strict=True))}


def tell(said) -> None:
    gathered = WORLD.gather(said, root=0)
    if gathered is not None:
        print(json.dumps(gathered))


def pace() -> float:
    """Seconds that a first run and a later one take now, at the slowest rank."""
    program = gathers(32)
    WORLD.Barrier()
    start = time.monotonic()
    for _ in range(2):
        mpi.run_program(program, inputs_of(program), timeout=LONG)
    return WORLD.allreduce(time.monotonic() - start, MPI.MAX)


def say(text: str) -> None:
    print(f"{text}\n", end="", file=sys.stderr, flush=True)  # one write: other ranks write there too


def segments() -> list[str]:
    """The shared memory of MPICH that this process has mapped, by the names it had."""
    mapped = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return sorted({f[5].split()[0] for f in mapped if len(f) == 6 and f[5].startswith("/dev/shm/mpich")})


def fault(kind: str, least: float) -> None:
    """Rank 2 stops, dies, comes late or never, or does not come as far as a step: all others wait."""
    timeout = max(least, PACE * pace())
    program = gathers(8)
    if kind in ("stopped", "killed"):
        mpi.run_program(program, inputs_of(program), timeout=LONG)
    WORLD.Barrier()
    if RANK == 0:
        say(f"timeout {timeout:g}, started at {time.monotonic()}")
    WORLD.Barrier()
    if ODD:
        match kind:
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "late":
                time.sleep(timeout / 4)
            case "never":
                time.sleep(LONG)
            case "stuck":  # comes, but not as far as the second step
                replace_step(1, lambda step: lambda *args: (time.sleep(LONG), step(*args))[1])
            case "chain":  # of the chain 3, 2, 1, 0 a member hangs: the last in line waits for it over another
                replace_step(0, lambda step: lambda *args: (time.sleep(LONG), step(*args))[1])
            case "creation":  # agrees, and then does not make its communicators
                mpi_agreed.connect = lambda _: time.sleep(LONG)
            case "raising":
                replace_step(1, lambda step: lambda *args: 1 // 0)
    tell(attempt(chain() if kind == "chain" else program, timeout))


def replace_step(number: int, make) -> None:
    bind, count = mpi_steps.bind_step, iter(range(100))
    mpi.bind_step = lambda *args: make(bind(*args)) if next(count) == number else bind(*args)


def unbind(*_):
    raise sp.errors.BackendError("MPI cannot run sideways")


def refused(kind: str) -> None:
    """Rank 2 refuses the first call, catches its error and comes again, as all do."""
    allowed, program, inputs = PACE * pace(), gathers(8), None
    WORLD.Barrier()
    if ODD:
        match kind:
            case "shards":
                inputs = [[np.ones((3, 4), np.int32)], [np.ones((4, 2), np.int32)]]
            case "count":
                inputs = [[], []]
            case "nonsense":
                inputs = [None, None]
            case "op":
                mpi.bind_step = unbind
            case "other":
                program = gathers(16)
    try:
        first = attempt(program, LONG, inputs)
    except TypeError as error:
        first = {"error": f"TypeError: {error}", "at": time.monotonic()}
    mpi.bind_step = mpi_steps.bind_step
    tell([allowed, first, attempt(gathers(8), LONG), attempt(gathers(8), LONG)])


def withdrawn(kind: str) -> None:
    """Rank 2, or every rank, refuses a program that was agreed on."""
    allowed, program = PACE * pace(), gathers(8)
    mpi.run_program(program, inputs_of(program), timeout=LONG)
    WORLD.Barrier()
    if kind == "all":
        first = attempt(program, LONG, [[], []])
        tell([allowed, first, attempt(program, LONG), attempt(program, LONG)])
        return
    if ODD:
        say(f"allowed {allowed:g}, refused at {time.monotonic()}")
        first = attempt(program, LONG, [[], []])
        say(f"rank 2 lives: {first['error']}")
        if kind == "early":
            WORLD.Barrier()
    elif kind == "early":  # the others come when the refusal is there
        WORLD.Barrier()
        first = attempt(program, LONG)
    else:
        first = attempt(program, LONG)
    tell([allowed, first, attempt(program, LONG), attempt(program, LONG)])


def uncaught() -> None:
    """Nobody catches what a refusal raises."""
    program = gathers(8)
    WORLD.Barrier()
    mpi.run_program(program, [[], []] if ODD else inputs_of(program), timeout=LONG)


def swapped(kind: str, least: float) -> None:
    """Two cached programs of one shape each, in another order on rank 2; messages, or all-to-alls."""
    timeout = max(least, PACE * pace())
    if kind == "messages":
        one, two = turned("i32[8@a, 8@b]", "i32[8@b, 8@a]"), turned("i32[8@(a,b), 8]", "i32[8@(b,a), 8]")
    else:
        one, two = gathers(8), gathers(16)
    for program, fill in ((one, 10), (two, 20)):
        assert attempt(program, LONG, fill=fill) == {"same": True}
    WORLD.Barrier()
    if RANK == 0:
        say(f"timeout {timeout:g}, started at {time.monotonic()}")
    order = [(one, 30), (two, 40)]
    tell([attempt(program, timeout, fill=fill) for program, fill in (order[::-1] if ODD else order)])


def counted() -> None:
    """Count the letters of first and of later calls, and of calls of more programs than are remembered."""
    letters, sent = world_letters(), []
    programs = [gathers(8 * k) for k in (1, 2, 3)]
    for program in (*programs, *programs, *programs):
        before = letters.sent
        assert attempt(program, LONG) == {"same": True}
        sent.append(letters.sent - before)
    mpi_agreed.MOST_AGREED = 2
    for program in (gathers(40), *programs, programs[2], programs[0]):
        before = letters.sent
        assert attempt(program, LONG) == {"same": True}
        sent.append(letters.sent - before)
    ((_, made),) = mpi_agreed.agreed_programs()._made.items()
    tell({"sent": sent, "remembered": len(made)})


def looping(kind: str) -> None:
    """Say which shared memory is mapped, and run until somebody is killed, raises, or all have had enough."""
    programs = [gathers(8), chain()]
    for number in range(10**9):
        for program in programs:
            mpi.run_program(program, inputs_of(program), timeout=LONG)
        if number == 0:
            WORLD.Barrier()
            if RANK == 0:
                say(f"mapped {json.dumps(segments())}")
            pids = WORLD.gather(os.getpid(), root=0)
            if pids is not None:
                say(f"pids {json.dumps(pids)}")
        if number == 20:
            match kind:
                case "ends":
                    return
                case "raises" if ODD:
                    raise ValueError("made to fail")
                case "aborts" if ODD:
                    with contextlib.suppress(sp.errors.LayoutError):
                        mpi.run_program(programs[0], [], timeout=LONG)


def main() -> None:
    match sys.argv[1:]:
        case "fault", kind, least:
            fault(kind, float(least))
        case "refused", kind:
            refused(kind)
        case "withdrawn", kind:
            withdrawn(kind)
        case ("uncaught",):
            uncaught()
        case "swapped", kind, least:
            swapped(kind, float(least))
        case ("counted",):
            counted()
        case "looping", kind:
            looping(kind)
        case other:
            raise SystemExit(f"what is {other}?")


if __name__ == "__main__":
    main()
