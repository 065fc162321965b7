"""Kinds of chunks against the chunks themselves: what ranks compute, and what they hold at most."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from shardplan.errors import ShardplanError
from shardplan.simulation.closed.chunk_kinds import AT_ONCE, ChunkKinds, layers_of
from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.strategy.schedules import schedule
from shardplan.strategy.strategy import Strategy

SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped-bfs", "zb-h1", "zb-v", "v-half", "dualpipev", "dualpipe")


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.sampled_from([2, 4, 8]))
    interleave = draw(st.sampled_from([2, 3])) if name in ("interleaved", "looped-bfs") else 1
    interleave = 2 if name in ("zb-v", "v-half", "dualpipev") else interleave
    microbatches = ranks * draw(st.integers(2, 9))
    try:
        schedule(name, ranks, microbatches, interleave)
    except ShardplanError:
        assume(False)
    return name, ranks, microbatches, interleave


def columns(pipes: list[tuple[str, int, int, int]]) -> Configurations:
    plain = Configurations.of([Strategy()] * len(pipes))
    name, ranks, microbatches, interleave = zip(*pipes, strict=True)
    said = {"schedule": [CODES["schedule"].index(one) for one in name], "pipeline": ranks, "interleave": interleave}
    return Configurations(
        {**plain.columns, **{k: np.array(v) for k, v in said.items()}, "global_batch": np.array(microbatches)}
    )


def held(pipe: tuple[str, int, int, int], whole: np.ndarray, late: np.ndarray, static: np.ndarray) -> float:
    """The most that any rank holds before an action that goes back, walked action by action, bytes by chunk given."""
    name, ranks, microbatches, interleave = pipe
    chunks, most = ranks * interleave, 0.0
    for row in schedule(name, ranks, microbatches, interleave).ranks:
        actions = [leaf for a in row if a is not None for leaf in a.leaves]
        stages = {a.stage for a in actions}
        now = sum(static[k % chunks] for k in stages)
        for action in actions:
            at, kind = action.stage % chunks, action.kind
            if kind in "FBIW":
                most = max(most, now) if kind != "F" else most
                now += {"F": whole[at], "B": -whole[at], "I": late[at] - whole[at], "W": -late[at]}[str(kind)]
    return most


@given(st.lists(pipelines(), min_size=1, max_size=4), st.lists(st.integers(1, 40), min_size=1, max_size=3), st.data())
def test_no_rank_holds_more_than_the_moments_that_are_kept(
    pipes: list[tuple[str, int, int, int]], runs: list[int], data: st.DataObject
) -> None:
    c = columns(pipes)
    kinds = ChunkKinds.of(tuple(runs), c)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    whole, static = rng.random((2, len(runs) + 2))
    late = whole * rng.choice([0.0, 0.5])  # what is left for W is at most what the microbatch kept
    ones = np.ones(len(pipes))
    nothing = np.zeros(())
    left = [kinds.sums(x[:, None] * ones) for x in (whole, late)]
    waiting = kinds.waiting(left[0], left[1], nothing)
    found = (waiting + kinds.on_ranks(kinds.sums(static[:, None] * ones))).max(axis=0)
    for pipe, most in zip(pipes, found.tolist(), strict=True):
        counts = layers_of(tuple(runs), pipe[1] * pipe[3])
        right = held(pipe, whole @ counts, late @ counts, static @ counts)
        least = 0.0 if pipe[0] in ("1f1b", *AT_ONCE) else 0.02  # of split passes two sums weigh moments, not all
        assert right * (1 - least) - 1e-9 <= most <= right + 1e-9, pipe


@given(st.lists(pipelines(), min_size=1, max_size=4), st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_ranks_compute_what_their_chunks_do(pipes: list[tuple[str, int, int, int]], runs: list[int]) -> None:
    kinds = ChunkKinds.of(tuple(runs), columns(pipes))
    seconds = np.random.default_rng(0).random((len(runs) + 2, 1)) * np.ones(len(pipes))
    each = kinds.sums(seconds)
    busiest = np.einsum("pkn,kn->pn", kinds.ranks, each).max(axis=0) / kinds.owners
    whole = (kinds.chunks * each).sum(axis=0)
    for k, (name, ranks, microbatches, interleave) in enumerate(pipes):
        chunks = seconds[:, k] @ layers_of(tuple(runs), ranks * interleave)
        np.testing.assert_allclose(chunks, each[kinds.pipelines[kinds.which[k]].of_chunk, k])
        np.testing.assert_allclose(whole[k], chunks.sum())
        passes = [[leaf.stage for a in row if a for leaf in a.leaves if leaf.kind == "F"]
                  for row in schedule(name, ranks, microbatches, interleave).ranks]  # fmt: skip
        np.testing.assert_allclose(
            busiest[k], max(chunks[np.array(row) % len(chunks)].sum() for row in passes) / microbatches
        )
