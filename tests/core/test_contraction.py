"""`contract` beside `numpy.einsum`, which knows nothing of it, and what it copies."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.core.contraction import contract

LETTERS = "abcde"


@st.composite
def contractions(draw: st.DrawFn) -> tuple[str, list[np.ndarray]]:
    """Dims of either operand or of both, summed or not, in any order."""
    sizes = {c: draw(st.sampled_from((2, 3, 1, 0))) for c in LETTERS}
    kinds = {c: draw(st.sampled_from(("row", "column", "summed", "batch"))) for c in LETTERS}

    def term(*of: str) -> str:
        return "".join(draw(st.permutations([c for c in LETTERS if kinds[c] in of])))

    terms = term("row", "summed", "batch"), term("column", "summed", "batch")
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    arrays = [np.asarray(rng.integers(-5, 6, [sizes[c] for c in term]), np.float64) for term in terms]
    return f"{terms[0]},{terms[1]}->{term('row', 'column', 'batch')}", arrays


@given(contractions())
def test_it_is_einsum(drawn: tuple[str, list[np.ndarray]]) -> None:
    """Of small whole numbers every order of sums is exact."""
    spec, arrays = drawn
    np.testing.assert_array_equal(contract(spec, *arrays), np.einsum(spec, *arrays))


@pytest.mark.parametrize("spec", ["ii,ij->j", "ij,jk,kl->il", "ij->ji", "ij,kj->i"])
def test_what_is_no_product_of_two_matrices_is_einsum_too(spec: str) -> None:
    arrays = [np.arange(9.0).reshape(3, 3)] * (1 + spec.count(","))
    np.testing.assert_array_equal(contract(spec, *arrays), np.einsum(spec, *arrays))


@pytest.mark.parametrize(
    ("spec", "one", "other"),
    [
        ("bsv,vh->bsh", (1, 64, 4096), (4096, 16)),
        ("bsv,bsh->vh", (2, 64, 4096), (2, 64, 16)),
        ("bsv,sbh->vh", (2, 64, 4096), (64, 2, 16)),
        ("sbh,bsv->hv", (64, 2, 16), (2, 64, 4096)),
        ("bsh,vh->bsv", (2, 64, 16), (4096, 16)),
        ("bsh,hgrd->bsgrd", (2, 512, 16), (16, 4, 2, 64)),
        ("bsgrd,bsh->hgrd", (2, 512, 4, 2, 64), (2, 512, 16)),
        ("bsgd,btgd->bgst", (2, 64, 4, 512), (2, 64, 4, 512)),
    ],
)
def test_no_operand_is_copied(spec: str, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Beside the result there is less than a tenth of the larger operand."""
    arrays = [np.ones(shape, np.float32) for shape in (one, other)]
    contract(spec, *arrays)
    tracemalloc.start()
    try:
        found = contract(spec, *arrays)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - found.nbytes < max(x.nbytes for x in arrays) / 10
