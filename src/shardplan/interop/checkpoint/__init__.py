"""Checkpoints on disk, from any storage to any other: `reshard`, `diff` (where two differ), `apply_delta`.

Everything streams by byte ranges within a memory limit; no process group and no GPU is used.

Reading order:

- `layouts`        a file of layouts, as weights
- `sources`        what a checkpoint holds: safetensors in its forms, and folders of torch.distributed.checkpoint
- `optimizer_names`  optimizer states, found by their names and named as a framework does
- `pickle_reader`  a pickle read as data: nothing it says is run
- `folders`        the metadata of the latter
- `distributed`    how the latter's tensors are read and written
- `windows`        the parts of a parameter that are in memory at a time
- `gather`         one window filled, by as few and as long reads as pay
- `output`         a file written so that its name never holds half of one, checked and read again
- `manifest`       what is finished, so that a killed run goes on
- `boxes`          what of every whole tensor a device holds
- `targets`        the files that a destination has
- `sharing`        several processes of a launcher, each with its part of the files
- `replicas`       copies of one element compared
- `jobs`           what a run needs, in one value
- `filling`        what every byte of a file is
- `deltas`         only what changed since another checkpoint, and how that is applied
- `reshard`        the verb
- `live`           the tensors of a live model, read as those of a checkpoint
- `job_state`      the state of a live job, written by its processes, and read under any layout
- `compare`        where an element stands in the model; two checkpoints, or a live model and one, compared so
"""

from shardplan.interop.checkpoint.compare import diff
from shardplan.interop.checkpoint.deltas import apply_delta, apply_live_delta
from shardplan.interop.checkpoint.reshard import reshard

__all__ = ["apply_delta", "apply_live_delta", "diff", "reshard"]
