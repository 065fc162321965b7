"""A fault of `faults/` is caught by the tests that it names: they hold what they say, and hold it tightly.

Here an eighth of them is planted, another one at another commit; `make faults` plants all.
"""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.planted import CAUGHT, NOT_RUN, SURVIVED, Fault, Server, altered, code_of, function_of, listed
from tests.turns import COLLECTED, LONG, ROOT, share

FAULTS = listed()
PLANTED = share(FAULTS, 8)

ROOMS = {
    *("core", "hardware", "plans", "movement", "strategy", "simulation", "fused", "launches", "execution", "interop"),
    *("report", "cli"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


def test_there_are_a_hundred_over_all_rooms_each_once() -> None:
    said = [(f.name, f.old, f.new) for f in FAULTS]
    assert len(said) == len(set(said)) >= 100
    places = [f.name.split(".")[1:] for f in FAULTS if f.name.startswith("shardplan.")]
    assert {room for room, *rest in places if rest} == ROOMS  # a function of the package itself is in none


def test_the_shares_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit has one share, and the commits whose number leaves another rest have the others."""
    found: list[Fault] = []
    for commit in range(5, 13):
        said = subprocess.CompletedProcess([], 0, f"{commit:08x}\n")
        monkeypatch.setattr(subprocess, "run", lambda *_, said=said, **__: said)
        found += share(FAULTS, 8)
    assert sorted(found, key=FAULTS.index) == list(FAULTS)


def test_the_long_files_are_there() -> None:
    assert [name for name in LONG if not (ROOT / "tests" / name.partition("::")[0]).is_file()] == []


def collected(files: list[str]) -> list[str]:
    """The tests of some files, as pytest names them."""
    asked = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:xdist", "-p", "no:cacheprovider", *files]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_tests_that_faults_name_are_there(request: pytest.FixtureRequest) -> None:
    """Of files that this run has in full, what it has collected is asked; the others are collected anew."""
    config = request.config
    parts = {word.partition("::")[0] for word in config.args if "::" in word}
    here = [name for name in config.stash[COLLECTED] if name.partition("::")[0] not in parts]
    named = {test for fault in FAULTS for test in fault.tests}
    others = {test.partition("::")[0] for test in named} - {name.partition("::")[0] for name in here}
    every = [*here, *(collected(sorted(others)) if others else [])]
    known = {name.partition("[")[0] for name in every}.union(every, (name.partition("::")[0] for name in every))
    assert sorted(named - known) == []


def test_every_fault_alters_what_stands_in_the_source_once() -> None:
    misfits: list[str] = []
    for fault in FAULTS:
        try:
            code_of(altered(fault), *function_of(fault.name))
        except (LookupError, SyntaxError) as error:
            misfits.append(f"{fault.name}: {error}")
    assert not misfits, "\n".join(misfits)


@pytest.mark.parametrize(
    ("name", "old", "reason"),
    [
        ("shardplan.core.mesh.primes", "no such line", "a fault's old 'no such line' stands 0 times in {}, not once"),
        ("shardplan.core.mesh.prime", "", "a fault is in {}, which is no function of the package"),
    ],
)
def test_a_fault_that_fits_nowhere_says_so_in_a_line(server: Server, name: str, old: str, reason: str) -> None:
    assert server.outcome(Fault(name, "nothing", old, old, ())) == (NOT_RUN, reason.format(name))


@pytest.mark.parametrize("fault", PLANTED, ids=[f"{f.name.removeprefix('shardplan.')}: {f.says}" for f in PLANTED])
def test_a_planted_fault_is_caught(server: Server, fault: Fault) -> None:
    status, said = server.outcome(fault)
    assert status == CAUGHT, said


def test_no_fault_is_no_failure(server: Server) -> None:
    """What is planted, not how, makes the tests fail: the same source again passes them; so do they when they run."""
    for fault in PLANTED[::50]:
        status, said = server.outcome(Fault(fault.name, "nothing", fault.old, fault.old, fault.tests))
        assert status == SURVIVED, said
