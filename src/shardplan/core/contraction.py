"""`contract`: an einsum of numpy as one batched product of views, so that no operand is copied that need not be.

`numpy.einsum` copies an operand wherever the order of its dims is not that of a dot product; BLAS takes transposed
matrices as they lie. So a chunk of logits, the widest value of a step, is there once.
"""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def contract(spec: str, *operands: Array) -> Array:
    """Return an einsum of arrays; of two without dims of one alone that are summed it is a product of matrices.

    Args:
        spec: As numpy's, with letters alone and the result named.
        operands: One array for each term of the spec.

    Returns:
        An array of the result's dims, which may lie transposed in memory.

    >>> contract("ik,kj->ji", np.eye(2), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist()
    [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    """
    terms, _, result = spec.partition("->")
    names = terms.split(",")
    if len(names) != 2 or any(len(set(term)) < len(term) for term in names):
        return np.einsum(spec, *operands, optimize=len(operands) > 1)
    a, b = names
    if any(c not in result and c not in other for term, other in ((a, b), (b, a)) for c in term):
        return np.einsum(spec, *operands, optimize=True)
    size = dict(zip(a + b, operands[0].shape + operands[1].shape, strict=True))
    batch = [c for c in result if c in a and c in b]
    rows, columns = ([c for c in term if c in result and c not in batch] for term in names)
    if not rows and not columns:  # element by element: no matrices
        return np.einsum(spec, *operands)
    summed = _order_as_they_lie([c for c in a if c in b and c not in result], names, operands)

    def as_matrices(term: str, x: Array, *sides: list[str]) -> Array:
        order = [term.index(c) for side in (batch, *sides) for c in side]
        return x.transpose(order).reshape([size[c] for c in batch] + [math.prod(size[c] for c in s) for s in sides])

    found = np.matmul(as_matrices(a, operands[0], rows, summed), as_matrices(b, operands[1], summed, columns))
    made = [*batch, *rows, *columns]
    return found.reshape([size[c] for c in made]).transpose([made.index(c) for c in result])


def _order_as_they_lie(summed: list[str], names: list[str], operands: tuple[Array, ...]) -> list[str]:
    """The dims that are summed, in the order of the larger operand: what the other may copy for it is less."""
    larger = names[int(operands[1].nbytes > operands[0].nbytes)]
    return sorted(summed, key=larger.index)
