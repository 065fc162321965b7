"""The law of compute ops: every legal assignment of axes equals the whole, every other is refused, for every op."""

from functools import partial

import numpy as np
import pytest

import oracle
from compute_examples import EXAMPLES, UNEQUAL, Example
from gradient_examples import GRADIENTS
from shardplan.core.ops import OPS, Compute
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.core.step import Step


def test_every_compute_op_has_an_example() -> None:
    found = {next(e.assigned(UNEQUAL))[0].name for e in (*EXAMPLES, *GRADIENTS)}
    elsewhere = {"ring_attention", "ring_attention_backward"}  # in test_ring.py
    assert found | elsewhere | {"sgd", "adamw", "adafactor", "backward", "opaque"} == {
        name for name, op in OPS.items() if issubclass(op, Compute)
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: str(next(e.assigned(UNEQUAL))[0]))
def test_every_legal_assignment_equals_the_whole(example: Example) -> None:
    rng = np.random.default_rng(0)
    arrays = example.arrays(UNEQUAL, rng)
    whole = np.asarray(example.whole(UNEQUAL, *arrays))
    count = 0
    for op, types in example.legal_ones(UNEQUAL):
        (found,) = op.infer(*types)
        assert found.shape == whole.shape
        (shards,) = op.reference([oracle.spread(a, t, rng) for a, t in zip(arrays, types, strict=True)], types)
        assert oracle.wrong(shards, found, whole) is None, (op, [str(t) for t in types], str(found))
        count += 1
    assert count == example.legal


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: str(next(e.assigned(UNEQUAL))[0]))
def test_a_result_is_nobody_elses_array(example: Example) -> None:
    """No device's result lies in the memory of another's or, but of a view, of an operand; a program's never does."""
    rng = np.random.default_rng(0)
    arrays = example.arrays(UNEQUAL, rng)
    for op, types in example.legal_ones(UNEQUAL):
        given = [oracle.spread(a, t, rng) for a, t in zip(arrays, types, strict=True)]
        names, results = ([f"{c}{k}" for k in range(len(ts))] for c, ts in (("x", types), ("y", op.infer(*types))))
        program = Program(list(zip(names, types, strict=True)), [Step(op, names, results)], results)
        runs = [partial(run_reference, program, given), *[partial(op.reference, given, types)] * (not op.view)]
        for run in runs:
            found = [x for shards in run() for x in shards]
            before = [x.tobytes() for x in found]
            others = [x for shards in given for x in shards]
            for x in found:
                assert not any(np.shares_memory(x, y) for y in others), op
                others.append(x)
            for x in found:
                x.fill(0)
            assert [x.tobytes() for shards in run() for x in shards] == before
