"""`erf`: the error function in numpy, which has none, by two rational functions, within 5e-16 of its value.

On [-1, 1] it is x P(x^2) / Q(x^2), beyond 1 - exp(-x^2) R(|x|) / S(|x|), with the coefficients of the Cephes library
(S. L. Moshier, release 2.9, `ndtr.c`). From 6 on it is 1 in f64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
_END = 6.0
_NEAR = (
    (9.60497373987051638749, 9.00260197203842689217e1, 2.23200534594684319226e3, 7.00332514112805075473e3,
     5.55923013010394962768e4),
    (1.0, 3.35617141647503099647e1, 5.21357949780152679795e2, 4.59432382970980127987e3, 2.26290000613890934246e4,
     4.92673942608635921086e4),
)  # fmt: skip
_FAR = (
    (2.46196981473530512524e-10, 5.64189564831068821977e-1, 7.46321056442269912687, 4.86371970985681366614e1,
     1.96520832956077098242e2, 5.26445194995477358631e2, 9.34528527171957607540e2, 1.02755188689515710272e3,
     5.57535335369399327526e2),
    (1.0, 1.32281951154744992508e1, 8.67072140885989742329e1, 3.54937778887819891062e2, 9.75708501743205489753e2,
     1.82390916687909736289e3, 2.24633760818710981792e3, 1.65666309194161350182e3, 5.57535340817727675546e2),
)  # fmt: skip


def erf(x: Floats) -> Floats:
    """Return 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to each element; of NaN it is NaN.

    >>> erf(np.array([-0.5, 0.0, 2.0])).round(6)
    array([-0.5205  ,  0.      ,  0.995322])
    """
    wide = np.asarray(x, np.float64)
    far = np.clip(np.abs(wide), 1.0, _END)
    beyond = np.copysign(1 - np.exp(-far * far) * _ratio(_FAR, far), wide)
    near = np.clip(wide, -1.0, 1.0)
    return np.where(np.abs(wide) > 1, beyond, near * _ratio(_NEAR, near * near)).astype(x.dtype)


def _ratio(terms: tuple[tuple[float, ...], tuple[float, ...]], x: Floats) -> Floats:
    return np.polyval(terms[0], x) / np.polyval(terms[1], x)
