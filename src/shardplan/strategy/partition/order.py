"""`ordered`: the schedule of a job, as the strategy says it, held against the strategy and the model."""

from __future__ import annotations

from shardplan.errors import LayoutError, ScheduleError
from shardplan.strategy.model import Model
from shardplan.strategy.schedules import Schedule, check, schedule
from shardplan.strategy.schedules.action import COMPUTE, RECEIVES, SENDS
from shardplan.strategy.schedules.offload import add_offloads
from shardplan.strategy.strategy import PREDICTED, Strategy
from shardplan.strategy.training import PRECISIONS

FORWARD = ("F", "SEND_F", "RECV_F")
RUN = (*COMPUTE, *SENDS, *RECEIVES, "OFFLOAD", "RELOAD")  # what else a file says, the programs do themselves


def check_predicted(strategy: Strategy) -> None:
    """Raise `LayoutError` for a precision that is predicted alone."""
    if strategy.precision in PREDICTED:
        raise LayoutError(
            f"strategy: precision={strategy.precision} is predicted, and no program has its narrow products; legal for "
            f"a job are {', '.join(PRECISIONS)}"
        )


def ordered(strategy: Strategy, model: Model) -> Schedule:
    """Return the order of actions: of a model that does not train the forward part.

    Raises `LayoutError` where nothing would be offloaded; `ScheduleError` for a generator that is not defined for these
    sizes, and for a schedule of one's own that is not complete, in whose order ranks wait in a circle, or that does
    not train where the model does.
    """
    said = strategy.schedule
    training = bool(model.fields["training"])
    sizes = strategy.pipeline, strategy.microbatches, strategy.interleave
    if not isinstance(said, Schedule):
        found = schedule(str(said), *sizes, forward_only=not training)
    else:
        if training and said.forward_only:
            raise ScheduleError(
                f"{said.label} runs nothing backward, and the model trains; legal are a B, or an I and a W, for each F"
            )
        kinds = RUN if training else FORWARD
        found = check(said.filter_actions(lambda a: a.kind in kinds), messages="buffered")
    apart = strategy.bucket is not None or (model.replaced and not training)  # state that a copy would have alone
    if found.copies > 2 or (found.copies > 1 and apart):
        raise ScheduleError(
            f"a job under {found.label}, which holds {found.copies} copies of the parameters; legal are two, without "
            "bucket, of a model without caches"
        )
    if not strategy.offload:
        return found
    if (away := add_offloads(found)) == found:
        raise LayoutError(
            f"strategy: offload with {strategy.microbatches} microbatches under {found.label}: a backward pass comes "
            "next, or next but one; legal are schedules with more between a forward pass and its backward pass"
        )
    return away
