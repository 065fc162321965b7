"""The mark of tests that need the lab's privileges: skipped, with what is missing, where it cannot run."""

import pytest

from shardplan.execution.lab import missing

pytest.importorskip("torch")
_lacking = missing()
needs_lab = pytest.mark.skipif(bool(_lacking), reason=_lacking or "the lab can run")
