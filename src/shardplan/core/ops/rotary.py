"""`Rotary`: positions as angles by which pairs of a vector turn; and how long contexts scale these angles.

Scalings are those that configs of Hugging Face name, by the formulas of its `modeling_rope_utils`: `linear`, `llama3`
(Llama 3.1) and `yarn` (arXiv 2309.00071). Each is a mean of the angle and of the angle divided by `factor`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import ClassVar

from shardplan.core.layout import Layout
from shardplan.core.ops.arithmetic import Elementwise, Expand
from shardplan.core.ops.composed import Composed
from shardplan.core.ops.compute import check_arity
from shardplan.core.ops.indexing import Iota
from shardplan.core.ops.placing import Cast, Reshape, cast_to, widened
from shardplan.core.ops.products import Einsum
from shardplan.core.program_builder import Cotangents, ProgramBuilder, Values
from shardplan.core.tensor import TensorType
from shardplan.errors import ParseError, TypingError, excerpt

# By kind what it takes, and whether it must be said.
_KINDS: Mapping[str, Mapping[str, bool]] = {
    "": {},
    "default": {},
    "linear": {"factor": True},
    "llama3": dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), True
    ),
    "yarn": {"factor": True, "original_max_position_embeddings": True}
    | dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"), False),
}


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """How a longer context scales the angles of rotary positions: a kind, and its numbers.

    >>> found = RotaryScaling.parse("yarn factor=4 original_max_position_embeddings=4096")
    >>> round(found.size, 4), RotaryScaling.parse("linear factor=2").angle(10000.0, 4)
    (1.1386, 'a * exp(b * -2.302585092994046) * 0.5')
    """

    kind: str = ""
    numbers: tuple[tuple[str, float], ...] = ()

    @staticmethod
    def parse(text: str) -> RotaryScaling:
        """Read a kind and its numbers, `linear factor=8`; raises `ParseError` for what is not computed."""
        kind, *words = text.split(" ")
        found: dict[str, float] = {}
        legal = _KINDS.get(kind)
        if legal is None:
            raise ParseError(f"rotary scaling {excerpt(text)}: {excerpt(kind)}; legal are {', '.join(_KINDS)[2:]}")
        for word in words:
            name, _, said = word.partition("=")
            if name not in legal:
                raise ParseError(f"rotary scaling {excerpt(text)}: {excerpt(name)}; legal are {', '.join(legal)}")
            try:
                found[name] = float(json.loads(said))
            except (ValueError, TypeError):
                raise ParseError(f"rotary scaling {excerpt(text)}: {excerpt(word)}; legal is a number") from None
        if lacking := [name for name, must in legal.items() if must and name not in found]:
            raise ParseError(f"rotary scaling {excerpt(text)} lacks {', '.join(lacking)}")
        return RotaryScaling(kind, tuple(found.items()))

    @property
    def size(self) -> float:
        """What vectors are multiplied with besides, so that scores keep their spread (YaRN, 3.4)."""
        if self.kind != "yarn":
            return 1.0
        said = dict(self.numbers)
        if "attention_factor" in said:
            return said["attention_factor"]
        if said.get("mscale") and said.get("mscale_all_dim"):
            return self._spread(said["mscale"]) / self._spread(said["mscale_all_dim"])
        return self._spread(1.0)

    @property
    def score_scale(self) -> float:
        """What DeepSeek's scores are multiplied with besides: by `mscale_all_dim`, once for queries and for keys."""
        said = dict(self.numbers).get("mscale_all_dim", 0.0)
        return self._spread(said) ** 2 if said else 1.0

    def _spread(self, scale: float) -> float:
        factor = dict(self.numbers)["factor"]
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1

    def angle(self, theta: float, half: int) -> str:
        """Return the angle of position `a` in pair `b` of `half` as an expression."""
        plain = f"a * exp(b * {-math.log(theta) / half})"
        said = dict(self.numbers)
        if self.kind in ("", "default"):
            return plain
        least = 1 / said["factor"]
        if self.kind == "linear":
            return f"{plain} * {least}"
        most = said["original_max_position_embeddings"]
        if self.kind == "llama3":  # by the turns that a pair makes in the context that it was trained in
            low, high = said["low_freq_factor"], said["high_freq_factor"]
            turns = f"{most / (2 * math.pi)} * exp(b * {-math.log(theta) / half})"
            kept = f"({turns} - {low}) / {high - low}"
        else:  # by the number of the pair, between those that make so many turns
            ends = [
                2 * half * math.log(most / (turns * 2 * math.pi)) / (2 * math.log(theta))
                for turns in (said.get("beta_fast") or 32.0, said.get("beta_slow") or 1.0)
            ]
            if said.get("truncate", 1.0):
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            first, last = max(ends[0], 0), min(ends[1], 2 * half - 1)
            kept = f"({last if last != first else first + 0.001} - b) / {last - first or 0.001}"
        return f"{plain} * ({least} + {1 - least} * where({kept} > 1, 1, where({kept} > 0, {kept}, 0)))"


@dataclass(frozen=True, slots=True)
class Rotary(Composed):
    """Pairs of the last dim of `[b s .. d]` turned by their position, i32 `[s]`: arXiv 2104.09864.

    A pair are elements i and i + d/2, or 2i and 2i + 1 where they are `interleaved`; the i-th turns by position /
    theta**(2i/d), or `back` by as much. `scaling` is a `RotaryScaling`'s text: it changes how fast they turn.
    """

    name: ClassVar[str] = "rotary"
    theta: float = 10000.0
    interleaved: bool = False
    back: bool = False
    scaling: str = ""

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """x cos + J x sin, where J turns a pair by a quarter."""
        t, _ = check_arity(self.name, operands, 2)
        if t.ndim < 3 or t.shape[-1] % 2:
            raise TypingError(f"{t}; legal are three dims or more, the last of an even size")
        half, pair = t.shape[-1] // 2, "h two=2" if self.interleaved else "two=2 h"
        between = ascii_uppercase[: t.ndim - 3]
        lead = " ".join(f"bs{between}")
        x = d(Reshape(f"{lead} ({pair}) -> {lead} {pair}"), widened(d, "0"))
        kind = d.types[x].dtype
        number = d(Iota(kind, (1, *((half, 1) if self.interleaved else (1, half))), 1 + (not self.interleaved),
                        Layout(((), (), ())), t.mesh))  # fmt: skip
        ones = " ".join(f"one{k}=1" for k in range(t.ndim - 1))
        position = d(Expand(f"s -> s {ones}"), d(Cast(kind), "1"))
        scaled = RotaryScaling.parse(self.scaling)
        angle = d(Elementwise(scaled.angle(self.theta, half)), position, number)
        quarter = (d(Iota(kind, (2, 2), k, Layout(((), ())), t.mesh)) for k in (1, 0))
        letters = ("ht", "hu") if self.interleaved else ("th", "uh")
        turn = Einsum(f"bs{between}{letters[0]},tu->bs{between}{letters[1]}")
        turned = d(turn, x, d(Elementwise("a - b"), *quarter))
        sign, size = "-" if self.back else "+", scaled.size
        one = f"a * cos(c) {sign} b * sin(c)"
        y = d(Elementwise(one if size == 1 else f"{size} * ({one})"), x, turned, angle)
        return [cast_to(d, d(Reshape(f"{lead} {pair} -> {lead} ({pair})"), y), t.dtype)]

    def pull(
        self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values, wanted: Sequence[bool]
    ) -> Cotangents:
        """The other way round, which reads the positions alone."""
        return [builder(replace(self, back=not self.back), cotangents[0], operands[1]), None]
