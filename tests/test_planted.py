"""Every fault of `faults/` is caught by the tests that it names: they hold what they say, and hold it tightly."""

import pytest
from tests.planted import CAUGHT, SURVIVED, Fault, listed, outcome

FAULTS = listed()


def test_names_are_given_once() -> None:
    said = [(f.name, f.old, f.new) for f in FAULTS]
    assert len(said) == len(set(said))


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{f.name.removeprefix('shardplan.')}: {f.says}" for f in FAULTS])
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    status, said = outcome(fault)
    assert status == CAUGHT, said


def test_no_fault_is_no_failure() -> None:
    """What is planted, not how, makes the tests fail: the same source again passes them."""
    for fault in FAULTS[::25]:
        status, said = outcome(Fault(fault.name, "nothing", fault.old, fault.old, fault.tests))
        assert status == SURVIVED, said
