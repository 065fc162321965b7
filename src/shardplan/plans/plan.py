"""`Plan`: a program with its certificate and predicted seconds: what redistribute and reduce return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardplan.core.program import Program
from shardplan.errors import ShardplanError, excerpt
from shardplan.notebook import notebook_html
from shardplan.plans.certificate import Certificate
from shardplan.plans.plan_file import annotate_steps, load_plan, save_plan


def path_of(value: object) -> Path:
    """Return a path, given as one or as text; raises `ShardplanError` for any other value."""
    if isinstance(value, (str, Path)) and "\0" not in str(value) and Path(value).name:
        return Path(value)
    raise ShardplanError(f"the path of a plan file is {excerpt(value)}; legal is a path, or its text")


@dataclass(frozen=True, slots=True)
class Plan:
    """A program, what is proved of it, and how long it is predicted to take."""

    program: Program
    certificate: Certificate
    _issued: Callable[[], Certificate] = field(init=False, repr=False, compare=False)
    _better: Callable[[], str] = field(default=str, repr=False, compare=False)  # of none it is known: `str()` is empty

    _repr_html_ = notebook_html

    def __post_init__(self) -> None:
        """Refuse what is no program or no certificate."""
        if not isinstance(self.program, Program) or not isinstance(self.certificate, Certificate):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ShardplanError(
                f"a plan of {excerpt(self.program)} and {excerpt(self.certificate)}; "
                "legal are a Program and its Certificate"
            )
        if self.program != self.certificate.program:
            raise ShardplanError("a plan of a program and the certificate of another; legal is that of the program")

    @staticmethod
    def from_issuer(program: Program, issued: Callable[[], Certificate]) -> Plan:
        """Return a plan whose certificate is derived when it is asked for: its bounds take longer than a program."""
        plan = object.__new__(Plan)
        object.__setattr__(plan, "program", program)
        object.__setattr__(plan, "_issued", issued)
        object.__setattr__(plan, "_better", str)
        return plan

    def __getattr__(self, name: str) -> Certificate:
        """Derive the certificate; an attribute that is set does not come here."""
        if name != "certificate":
            raise AttributeError(f"a plan has no attribute {name!r}", name=name, obj=self)
        object.__setattr__(self, name, self._issued())
        return self.certificate

    @property
    def better(self) -> str:
        """The line that says which placement of the mesh, or which stop, takes 10 % less; empty where none is known."""
        if (found := self._better()) and self._better is not str:
            object.__setattr__(self, "_better", lambda: found)
        return found

    @property
    def seconds(self) -> float:
        """The predicted seconds; without a topology those of the nominal switch."""
        return self.certificate.seconds

    @property
    def least_seconds(self) -> float:
        """The seconds of the cheapest program found: another one where seconds within 10 % tell nothing apart."""
        least = self.certificate.least_seconds
        return self.seconds if least is None else least

    @property
    def types(self) -> tuple[object, ...]:
        """The types after each step."""
        return self.certificate.types

    def save(self, path: str | Path) -> None:
        """Write a plan file (JSON), atomically; raises `ShardplanError` where that cannot be."""
        save_plan(self.certificate, path_of(path))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file; its claims are as written: call `certificate.check()`. Raises `ParseError`."""
        certificate = load_plan(path_of(path))
        return Plan(certificate.program, certificate)

    def __str__(self) -> str:
        """Return the program with bytes and seconds beside every step, and what a better placement would take."""
        return "\n".join(filter(None, (annotate_steps(self.certificate), self.better)))

    def __repr__(self) -> str:
        """Return what it moves, in how many steps, and what its certificate says of them."""
        return f"<Plan {self.certificate.summary}>"
