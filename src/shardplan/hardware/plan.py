"""`Plan`: a program with its certificate and predicted seconds: what redistribute and reduce return."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardplan.core.program import Program
from shardplan.hardware.certificate import Certificate


@dataclass(frozen=True, slots=True)
class Plan:
    """A program, what is proved of it, and how long it is predicted to take."""

    program: Program
    certificate: Certificate

    @property
    def seconds(self) -> float:
        """The predicted seconds; without a topology those of the nominal switch."""
        return self.certificate.seconds

    @property
    def types(self) -> tuple[object, ...]:
        """The types after each step."""
        return self.certificate.types

    def save(self, path: str | Path) -> None:
        """Write a plan file (JSON), atomically."""
        from shardplan.hardware.planfile import save_plan

        save_plan(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file; its claims are as written: call `certificate.check()`. Raises `ParseError`."""
        from shardplan.hardware.planfile import load_plan

        return load_plan(Path(path))

    def __str__(self) -> str:
        """Return the program with bytes and seconds beside every step."""
        from shardplan.hardware.planfile import annotated

        return annotated(self)
