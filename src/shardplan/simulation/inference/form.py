"""`RequestForm`: what requests take under many strategies at once, from readings of a model's forward steps.

A replica's sequences begin together, in groups (a strategy's microbatches) that follow each other through the stages.
The prompts of all groups are read, then each step makes a token of every sequence. With g groups, and s the seconds of
a group on the stages, prompts take sum(s) + (g - 1) max(s). A token takes sum(s), or g max(s) where that is longer: a
group's next token needs its last one, so with fewer groups than stages some stages wait. Where exchanges with experts
overlap, prompts of two groups are on a stage in turn, and one computes while tokens of the other are under way; of an
odd number one is alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardplan.core import validation
from shardplan.errors import ShardplanError
from shardplan.hardware.topology import Topology
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.inference.forward import forward_bytes, forward_times
from shardplan.simulation.inference.requests import Requests, forward_model
from shardplan.strategy.model import Model

Floats = np.ndarray
ISSUED = ("graph", "host", "eager")  # by whom the kernels of a step are
ROUNDING = 1e-12  # of sums in another order


class PricedRequests(NamedTuple):
    """Of every configuration, [n] each: seconds, tokens a second of all replicas, and bytes of the worst device.

    Seconds are those to the first token, of each token behind it, and of a request.
    """

    first_token: Floats
    token: Floats
    latency: Floats
    tokens_per_second: Floats
    peak_bytes: Floats
    parameter_bytes: Floats
    cache_bytes: Floats


class ObjectiveValues(NamedTuple):
    """Of every configuration: the seconds that are made least, and bytes of the worst device, [n] each."""

    seconds: Floats
    peak_bytes: Floats


@dataclass(frozen=True, slots=True, eq=False)
class RequestForm:
    """The closed form of requests to a model on a topology; `objective` is `latency` or `tokens`.

    Steps of tokens are priced at the mean length of the cache: attention's price is linear in it. Who issues their
    kernels is said by `issued`: of a `graph` that was captured no host starts them, and their collectives start as fast
    as links do, those of prompts not; `host` is an engine that launches each, `eager` one that does so from Python.

    >>> from shardplan.strategy.strategy import Strategy
    >>> model = Model.load("gpt2", precision="bf16")
    >>> topology = Topology.load("dgx-a100-80g", nodes=1)
    >>> form = RequestForm.of(model, topology, Parameters(), Requests(128, 32, 4))
    >>> out = form.priced(Configurations.of([Strategy(tensor=4, data=2, microbatch=4, global_batch=8)]))
    >>> bool((out.latency > out.first_token).all()), out.tokens_per_second.shape
    (True, (1,))
    """

    prompts: ClosedForm
    tokens: tuple[ClosedForm, ...]
    requests: Requests
    objective: str = "latency"
    issued: str = "graph"

    @staticmethod
    def of(
        model: Model, topology: Topology, params: Parameters, requests: Requests, objective: str = "latency",
        issued: str = "graph",
    ) -> RequestForm:  # fmt: skip
        """Load the forward steps; raises `ShardplanError` for a model without caches, or of fewer positions."""
        validation.choice("requests: issued", issued, ISSUED, ShardplanError)
        forward_model(model, 1, requests.positions)
        slow, quick = _issued_by(issued, params)
        prompts = ClosedForm(forward_model(model, requests.prompt, requests.prompt), topology, slow)
        graph = issued == "graph"
        tokens = tuple(
            ClosedForm(forward_model(model, 1, n), topology, quick, captured=graph) for n in requests.lengths
        )
        return RequestForm(prompts, tokens, requests, objective, issued)

    def on(self, topology: Topology, parameters: Parameters) -> RequestForm:
        """Return the form on another topology, or with other parameters; what was read stays."""
        slow, quick = _issued_by(self.issued, parameters)
        tokens = tuple(form.on(topology, quick) for form in self.tokens)
        return RequestForm(self.prompts.on(topology, slow), tokens, self.requests, self.objective, self.issued)

    def priced(self, c: Configurations) -> PricedRequests:
        """Price them; `microbatch` is the sequences of a group, and divides `concurrency`."""
        found = np.zeros((len(PricedRequests._fields), len(c)))
        for at, one in _by_stages(c):
            found[:, at] = self._stages(one)
        return PricedRequests(*found)

    def __call__(self, c: Configurations) -> ObjectiveValues:
        """Return what is made least."""
        out = self.priced(c)
        return ObjectiveValues(self._least(c, out.latency), out.peak_bytes)

    def alike(self, c: Configurations) -> list[Floats]:
        """Return nothing: each strategy has one order of its axes."""
        return []

    def floors(self, c: Configurations) -> tuple[Floats, Floats]:
        """Return seconds and bytes, [n] each, that none is below, whatever its groups are.

        A group is on a stage no shorter than a sequence of it alone, and all groups no shorter than as one; so a stage
        is busy as long as with one group, and the other stages are passed as by one sequence.
        """
        seconds, nbytes = np.zeros(len(c)), np.zeros(len(c))
        for at, one in _by_stages(c):
            (first, token, hidden), (first_all, token_all, hidden_all) = (
                self._times(_grouped(one, n)) for n in (1, self.requests.concurrency)
            )
            first, first_all = first - hidden, first_all - hidden_all
            busy, busy_all = first.max(axis=1), first_all.max(axis=1)
            prompts = first.sum(axis=1) - busy + busy_all
            tokens = np.maximum(token.sum(axis=1), token_all.max(axis=1))
            seconds[at] = prompts + (self.requests.output - 1) * tokens
            nbytes[at] = self._bytes(_grouped(one, 1))[0]
        return self._least(c, seconds) * (1 - ROUNDING), nbytes * (1 - ROUNDING)

    def _least(self, c: Configurations, latency: Floats) -> Floats:
        """The seconds of a request, or those of a token of all that are in flight."""
        if self.objective == "latency":
            return latency
        return latency / (c.columns["data"] * self.requests.concurrency * self.requests.output)

    def _stages(self, c: Configurations) -> tuple[Floats, ...]:
        first, token, hidden = self._times(c)
        groups = self.requests.concurrency / c.columns["microbatch"]
        first = first - hidden * (groups // 2 * 2 / groups)[:, None]
        prompts = first.sum(axis=1) + (groups - 1) * first.max(axis=1)
        each = np.maximum(token.sum(axis=1), groups * token.max(axis=1))
        latency = prompts + (self.requests.output - 1) * each
        made = c.columns["data"] * self.requests.concurrency * self.requests.output
        return prompts, each, latency, made / latency, *self._bytes(c)

    def _times(self, c: Configurations) -> tuple[Floats, Floats, Floats]:
        """The seconds of a group's prompts, and of a token of each, on every stage: [n, stages] each.

        Last those that prompts take less beside those of another group.
        """
        alone = whole_sequences(c)
        steps = [forward_times(form, alone) for form in self.tokens]
        token = sum((one.stages for one in steps), np.zeros(())) / len(steps)
        behind = sum((one.behind for one in steps), np.zeros(())) / len(steps)
        first, _, hidden = forward_times(self.prompts, c)
        for stages in (first, token):
            stages[:, -1] += behind
        return first, token, hidden

    def _bytes(self, c: Configurations) -> tuple[Floats, Floats, Floats]:
        p, t = self.prompts.parameters, self.requests
        step = forward_bytes(self.tokens[-1], whole_sequences(c), t.positions, t.concurrency)
        prompts = forward_bytes(self.prompts, c, t.positions, t.concurrency)
        in_turn = 1 + (c.columns["expert_overlap"] & (c.columns["microbatch"] < t.concurrency))[:, None]
        work = np.maximum(prompts.work * in_turn, step.work)
        work[:, -1] = np.maximum(work[:, -1], step.behind)
        total = step.parameters + step.caches + p.fragmentation * work
        worst = total.argmax(axis=1)[:, None]
        parts = (np.take_along_axis(x, worst, 1)[:, 0] for x in (total + p.context, step.parameters, step.caches))
        most, parameters, caches = parts
        return most, parameters, caches


def _issued_by(issued: str, params: Parameters) -> tuple[Parameters, Parameters]:
    """Parameters of the steps of prompts and of tokens, by who issues their kernels."""
    slow = replace(params, launch=params.eager) if issued == "eager" else params
    return slow, replace(params, launch=0.0, eager=0.0) if issued == "graph" else slow


def whole_sequences(c: Configurations) -> Configurations:
    """Return what runs a step of one token: no axis cuts its sequence, and ranks of `context` do as replicas do."""
    col, times = c.columns, c.columns["context"]
    replicas = {"data": col["data"] * times, "shard": col["shard"] * times, "global_batch": col["global_batch"] * times}
    cut = {"context": np.ones_like(times), "sequence_parallel": np.zeros(len(c), dtype=bool)}
    return Configurations({**col, **replicas, **cut})


def _by_stages(c: Configurations) -> Iterator[tuple[np.ndarray, Configurations]]:
    """Configurations of one number of stages, and their places."""
    for value in np.unique(c.columns["pipeline"]):
        at = np.flatnonzero(c.columns["pipeline"] == value)
        yield at, c[at]


def _grouped(c: Configurations, sequences: int) -> Configurations:
    return Configurations({**c.columns, "microbatch": np.full(len(c), sequences)})
