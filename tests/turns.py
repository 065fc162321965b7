"""Shares of what takes long: the commit says which one a run has, so that some commits in a row have all."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, seed, settings

T = TypeVar("T")
# The tests that a run has found, before any was left out; the tests of `planted` ask for them.
COLLECTED = pytest.StashKey[frozenset[str]]()
ROOT = Path(__file__).resolve().parents[1]
# Files of many cases, and one test of many, each a case by itself, that take long together.
LONG = (
    "test_planted.py::test_a_planted_fault_is_caught", "benchmarks/test_gpu.py", "cli/test_statuses.py",
    "core/test_compute_law.py", "core/test_gradients.py", "core/test_opened.py",
    "execution/test_compute_law.py", "execution/test_jax.py", "execution/test_jobs.py", "execution/test_lab.py",
    "execution/test_mpi_faults.py", "execution/test_outside_ops.py", "execution/test_torch.py",
    "execution/test_torch_faults.py", "execution/test_torch_lowering.py", "fused/test_calls.py",
    "fused/test_devices.py", "fused/test_graphs.py", "fused/test_grouped.py", "fused/test_growth.py",
    "fused/test_operators.py", "fused/test_symmetry.py", "fused/test_tensor_parallel.py", "fused/test_tiles.py",
    "fused/test_triton.py", "hardware/test_group_loads.py", "interop/test_checkpoint.py",
    "interop/test_checkpoint_dcp.py", "interop/test_checkpoint_live.py", "interop/test_checkpoint_processes.py",
    "interop/test_checkpoint_towers.py", "interop/test_export.py", "interop/test_export_msccl.py",
    "interop/test_imported_training.py", "interop/test_importers_constants.py",
    "interop/test_importers_jax_control.py", "interop/test_importers_refusals.py", "interop/test_jax_dropin.py",
    "interop/test_jax_modes.py", "interop/test_jax_random.py", "interop/test_jax_reshard.py",
    "interop/test_operators.py", "interop/test_refit.py", "interop/test_refit_hops.py",
    "interop/test_refit_meeting.py", "interop/test_torch.py", "interop/test_torch_state.py",
    "launches/test_handover.py", "launches/test_scaled.py", "models/test_plain_training.py",
    "movement/test_batch.py", "movement/test_better_placement.py", "movement/test_counterexamples.py",
    "movement/test_crossmesh.py", "movement/test_laws.py", "movement/test_limits.py",
    "movement/test_pipelines.py", "movement/test_reductions.py", "movement/test_search.py",
    "movement/test_weights_derived.py", "movement/test_weights_faults.py", "movement/test_weights_models.py",
    "movement/test_weights_tables.py", "plans/test_nominal.py", "plans/test_replay.py",
    "simulation/jobs/test_job_timeline.py", "simulation/jobs/test_rendezvous.py",
    "simulation/jobs/test_sweep.py", "simulation/parity/test_parity.py", "simulation/test_accuracy.py",
    "simulation/test_answer.py", "simulation/test_closed_form.py", "simulation/test_cuts.py",
    "simulation/test_events.py", "simulation/test_fit.py", "simulation/test_forward_steps.py",
    "simulation/test_memory_agreement.py", "simulation/test_own_plans.py", "simulation/test_reading.py",
    "simulation/test_replay.py", "simulation/test_search.py", "simulation/test_serving.py",
    "simulation/test_step_events.py", "simulation/test_step_physics.py", "simulation/test_why.py",
    "strategy/schedules/test_generators.py", "strategy/test_ignored_targets.py", "strategy/test_job_memory.py",
    "strategy/test_job_schedules.py", "strategy/test_options.py", "strategy/test_partition.py",
    "strategy/test_precision.py", "strategy/test_presets.py", "strategy/test_settle.py",
    "strategy/test_small_models.py", "strategy/test_split.py",
)  # fmt: skip

# Of parameters that stand for a launch, or an op whose every assignment is typed: tests of one are one case, as each
# alone would pay for all of it.
LAUNCHES = ("said", "failed", "example")


def commit() -> int:
    """A number that the commit says, 0 outside git."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    said = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return int(said or "0", 16)


def case_of(item: pytest.Item) -> str:
    """Return the case that a test belongs to: the launch that it shares with others, or itself."""
    called: Any = getattr(item, "callspec", None)
    shared = [name for name in LAUNCHES if called is not None and name in called.params]
    return f"{shared[0]} {called.indices[shared[0]]}" if shared else item.nodeid


def share_of_cases(items: Sequence[pytest.Item], parts: int) -> list[pytest.Item]:
    """Return the tests of one of some shares of the cases of a file."""
    chosen = set(share(list(dict.fromkeys(map(case_of, items))), parts))
    return [item for item in items if case_of(item) in chosen]


def draw_share(item: pytest.Item, parts: int, turn: int) -> None:
    """Have a law of Hypothesis draw one of some shares of its examples: so many less, by a seed that the turn says."""
    law: Any = getattr(item, "obj", None)
    if not getattr(law, "is_hypothesis_test", False) or hasattr(law, "has_share"):  # all cases of one have its settings
        return
    whole: settings = law._hypothesis_internal_use_settings or settings.default
    quiet = (*whole.suppress_health_check, HealthCheck.filter_too_much)  # which is judged on the first few
    law._hypothesis_internal_use_settings = settings(
        whole, max_examples=-(-whole.max_examples // parts), suppress_health_check=quiet
    )
    law.has_share = True
    if turn % parts:  # else the first of those that a whole run draws
        seed(turn % parts)(law)


def share(things: Sequence[T], parts: int) -> tuple[T, ...]:
    """Return one of some shares, spread over all of them: which one, the commit says."""
    return tuple(things[commit() % parts :: parts])
