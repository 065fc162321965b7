"""What no strategy of a frame is below: `ClosedForm.floors` of one that stands for it."""

from __future__ import annotations

import numpy as np

from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.searching.space import StrategySpace

Floats = np.ndarray


def frame_floors(form: ClosedForm, space: StrategySpace, frames: np.ndarray) -> tuple[Floats, Floats]:
    """Return seconds and bytes, [frames] each, that no strategy of these frames is below."""
    return form.floors(space.columns(frames, space.floor_order, 0))
