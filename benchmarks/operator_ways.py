"""A case on one rank: run it with DTensor's own moves, then with ours in their place, and say what differs.

A run has four steps, each a question of its own (a rank that fails in one must not let the others wait in the next):
the call, its results gathered, the gradient, the gradients gathered.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.operator_cases import (
    INPUTS,
    MESHES,
    OPERATOR,
    ORDERS,
    Case,
    Placed,
    Problem,
    database,
    drawn,
    laid,
    part,
    problem,
    weights,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from shardplan.interop import torch as drop_in
from shardplan.interop.torch import moves

STOCK, OURS = "stock", "ours"
STEPS = ("call", "results", "gradient", "gradients")
WAIT = 120.0  # seconds that a move may wait for other ranks
LETTERS = {Replicate: "R", Shard: "S", _StridedShard: "strided S", Partial: "P"}


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception."""

    kind: str
    text: str

    @staticmethod
    def of(error: BaseException) -> Failed:
        """What an exception says in one line."""
        lines = [x.strip() for x in str(error).splitlines() if x.strip()]
        return Failed(type(error).__name__, (lines[0] if lines else "")[:400])


@dataclass(slots=True)
class Run:
    """What came out of a case one way."""

    inputs: list[DTensor]
    results: list[Any] = field(default_factory=list)
    gathered: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    gathered_gradients: list[Any] = field(default_factory=list)


class Ours:
    """Our moves in the place of DTensor's; counts what they moved."""

    def __init__(self) -> None:
        self.moves: Counter[str] = Counter()

    def local(
        self, local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, *,
        async_op: bool = False, use_graph_based_transform: Any = None, is_explicit: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """In the place of `redistribute_local_tensor`."""
        if current_spec.mesh != target_spec.mesh:
            raise NotImplementedError("Cross device mesh comm not supported yet!")
        move = moves.move_between(current_spec, target_spec, None, (None, None, WAIT))
        if move is None:
            return local_tensor
        self.moves[_kind(current_spec, target_spec)] += 1
        return moves.move_shard(local_tensor, move, async_op)

    def whole(
        self, tensor: DTensor, device_mesh: Any = None, placements: Any = None, *, async_op: bool = False,
        forward_dtype: Any = None, backward_dtype: Any = None,
    ) -> DTensor:  # fmt: skip
        """In the place of `DTensor.redistribute`."""
        if placements is None:
            raise RuntimeError("placements is needed for redistribute!")
        dtypes = {"forward_dtype": forward_dtype, "backward_dtype": backward_dtype}
        named = {k: v for k, v in dtypes.items() if v is not None}
        out = drop_in.redistribute(tensor, list(placements), device_mesh, async_op=async_op, timeout=WAIT, **named)
        if out is not tensor:
            self.moves[_kind(tensor._spec, out._spec)] += 1
        return out

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Put our moves in the place of DTensor's while the block runs."""

        def whole(*given: Any, **named: Any) -> DTensor:  # a function, so that it becomes a method of DTensor
            return self.whole(*given, **named)

        places: list[tuple[Any, str, Any]] = [(DTensor, "redistribute", whole)]
        places += [(m, "redistribute_local_tensor", self.local) for m in (_redistribute, _dispatch, _api)]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        try:
            for owner, name, value in places:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


def _kind(source: DTensorSpec, target: DTensorSpec) -> str:
    """The kinds of placements that a move changes, as `S S -> R S`; a star where dims nest in another order."""

    def letters(spec: DTensorSpec) -> str:
        star = "" if spec.shard_order is None or DTensorSpec.is_default_device_order(spec.shard_order) else "*"
        return " ".join(
            LETTERS.get(type(p), type(p).__name__) + (f"({p.reduce_op})" if isinstance(p, Partial) else star)
            for p in spec.placements
        )

    return f"{letters(source)} -> {letters(target)}"


class Answers:
    """A rank of a group: draws a case, runs it step by step either way, compares."""

    def __init__(self, rank: int, world: int, meet: Callable[[int], int]):
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
            meet(store.port)
        else:
            store = dist.TCPStore("127.0.0.1", meet(0), world, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=WAIT))
        self.rank = rank
        self.meshes = [init_device_mesh("cpu", shape) for shape in MESHES[world]]
        self.swap = Ours()
        self.problem: Problem | None = None
        self.runs: dict[str, Run] = {}
        self.truth: Truth | None = None

    def __call__(self, question: tuple[Any, ...]) -> Any:
        """Answer `("draw", case)`, `("step", way, step)`, `("wrong", way)` or `("judge", steps)`, or with an error."""
        name, *rest = question
        try:
            return getattr(self, name)(*rest)
        except Exception as error:
            return Failed.of(error)

    def draw(self, case: Case) -> Any:
        """Draw the case and run it on plain tensors; what it is in words, or None where there is none."""
        self.runs, self.problem, self.truth = {}, None, None
        self.swap.moves.clear()
        found = problem(case, self.meshes)
        if found is None:
            return None
        self.truth = truth_of(found)
        if case.kind == OPERATOR:
            again = truth_of(found, seed=2)
            found.empty = "empty" in database()[case.operator].name
            found.random = any(
                close(a, b) == "different" for a, b in zip(self.truth.results, again.results, strict=True)
            )
        self.problem = found
        return found.about

    def step(self, way: str, step: str) -> Any:
        """Run a step one way; None, or how it failed."""
        assert self.problem is not None
        torch.manual_seed(1)
        random.seed(1)
        with self.swap() if way == OURS else contextlib.nullcontext():
            getattr(self, f"_{step}")(way)
        return None

    def _call(self, way: str) -> None:
        """Distribute the inputs and run the operator."""
        p = self.problem
        assert p is not None
        run = self.runs[way] = Run(p.distributed(self.rank))
        run.results = pytree.tree_leaves(p.call(list(run.inputs)))

    def _results(self, way: str) -> None:
        """Gather the results."""
        run = self.runs[way]
        with torch.no_grad():
            run.gathered = [_gathered(x) for x in run.results]

    def _gradient(self, way: str) -> None:
        """Run backward, from the same weights of the results both ways."""
        p, run = self.problem, self.runs[way]
        assert p is not None
        at = [k for k, x in enumerate(run.results) if isinstance(x, torch.Tensor) and x.requires_grad]
        inputs = [x for x in run.inputs if x.requires_grad]
        if not at or not inputs:
            return
        outputs = [run.results[k] for k in at]
        given: list[Any] = []
        for k, (x, w) in enumerate(zip(outputs, weights(outputs, p.seed), strict=True)):
            if isinstance(x, DTensor):
                given.append(laid(w, x.device_mesh, grad_place(x, f"{p.seed} {k}"), f"{p.seed} weights {k}"))
            else:
                given.append(w)
        run.gradients = list(torch.autograd.grad(outputs, inputs, given, allow_unused=True))

    def _gradients(self, way: str) -> None:
        """Gather the gradients."""
        run = self.runs[way]
        with torch.no_grad():
            run.gathered_gradients = [_gathered(x) for x in run.gradients]

    def judge(self, steps: int) -> dict[str, Any]:
        """What ours is wrong in, what it moved, and beside the first steps of stock: how it differs."""
        return {"wrong": self.wrong(OURS), "moves": dict(self.swap.moves)} | self._compared(steps)

    def _compared(self, steps: int) -> dict[str, list[str]]:
        """What differs between the two ways beyond rounding, and within it."""
        assert self.problem is not None
        stock, ours = (self.runs.get(way, Run([])) for way in (STOCK, OURS))
        out: dict[str, list[str]] = {"differs": [], "rounding": []}
        pairs = (
            ("result", stock.results, ours.results),
            ("gathered result", stock.gathered, ours.gathered),
            ("gradient", stock.gradients, ours.gradients),
            ("gathered gradient", stock.gathered_gradients, ours.gathered_gradients),
        )
        for name, a, b in pairs[:steps]:
            if len(a) != len(b):
                out["differs"].append(f"{len(b)} of {name}, not {len(a)}")
                continue
            for k, (x, y) in enumerate(zip(a, b, strict=True)):
                kind, text = unlike(x, y)
                if kind and not (self.problem.empty and text == "values"):
                    out[kind].append(f"{name} {k}: {text}")
        return out

    def wrong(self, way: str) -> list[str]:
        """What is not as plain tensors have it, or not as its own spec says: a line each."""
        assert self.problem is not None and self.truth is not None
        run, out = self.runs.get(way), list[str]()
        if run is None or self.problem.random or self.problem.empty:
            return out
        for what, mine in (("result", run.results), ("gradient", run.gradients)):
            out += [f"{what} {k}: shards that its spec does not say" for k, x in enumerate(mine) if not sound(x)]
        for what, truth, mine in (
            ("result", self.truth.results, run.gathered), ("gradient", self.truth.gradients, run.gathered_gradients),
        ):  # fmt: skip
            for k, (x, y) in enumerate(zip(truth, mine, strict=False)):
                if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and close(x, y) == "different":
                    out.append(f"{what} {k}: other values than plain tensors give")
        return out + [f"result {k}: not the indices of its placements" for k in self._misplaced(run)]

    def _misplaced(self, run: Run) -> list[int]:
        """Moves whose shards are not those that their targets say."""
        p = self.problem
        assert p is not None
        found = []
        for k, (target, full) in enumerate(zip(p.targets, p.fulls, strict=False)):
            if any(isinstance(q, Partial) for q in target.placements):
                continue
            if (
                k < len(run.results)
                and close(laid(full, p.mesh, target, "")._local_tensor, run.results[k]._local_tensor) == "different"
            ):
                found.append(k)
        return found


@dataclass(frozen=True, slots=True)
class Truth:
    """What plain tensors give."""

    results: list[Any]
    gradients: list[Any]


def truth_of(p: Problem, seed: int = 1) -> Truth:
    """What the operator gives on whole tensors in one process: results and gradients."""
    torch.manual_seed(seed)
    random.seed(seed)
    inputs = p.copies()
    results = pytree.tree_leaves(p.plain(list(inputs)))
    outputs = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    leaves = [x for x in inputs if x.requires_grad]
    gradients: list[Any] = []
    if outputs and leaves:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            given = weights(outputs, p.seed)
            gradients = list(torch.autograd.grad(outputs, leaves, given, allow_unused=True))
    return Truth([x.detach() if isinstance(x, torch.Tensor) else x for x in results], gradients)


def grad_place(x: DTensor, seed: str) -> Placed:
    """Random placements of a gradient, of its own."""
    return drawn(random.Random(seed), tuple(x.shape), x.dtype, x.device_mesh, partial=False)


def sound(x: Any) -> bool:
    """Whether the shard has the shape that the spec says (of `_StridedShard`: nothing is asked)."""
    if not isinstance(x, DTensor) or any(isinstance(p, _StridedShard) for p in x.placements):
        return True
    placed = Placed(x.placements, x._spec.shard_order)
    return part(torch.empty(x.shape, device="meta"), x.device_mesh, placed).shape == x._local_tensor.shape


def _gathered(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def unlike(x: Any, y: Any) -> tuple[str, str]:
    """How a value of ours (`y`) is unlike the stock one: ("", "") where it is alike, else a kind and words."""
    if type(x) is not type(y):
        return "differs", f"a {type(y).__name__}, not a {type(x).__name__}"
    if not isinstance(x, torch.Tensor):
        same = x == y or (isinstance(x, float) and x != x and y != y)
        return ("", "") if same else ("differs", f"{y!r}, not {x!r}"[:200])
    if x.requires_grad != y.requires_grad:
        return "differs", f"requires_grad {y.requires_grad}, not {x.requires_grad}"
    a, b = x, y
    if isinstance(x, DTensor):
        if x._spec != y._spec or x.placements != y.placements or x.device_mesh != y.device_mesh:
            return "differs", f"spec {y._spec}, not {x._spec}"
        a, b = x._local_tensor, y._local_tensor
    if a.dtype != b.dtype or a.shape != b.shape or x.shape != y.shape:
        return "differs", f"{b.dtype} {list(b.shape)}, not {a.dtype} {list(a.shape)}"
    verdict = close(a, b)
    return ("", "") if verdict == "equal" else ("differs" if verdict == "different" else verdict, "values")


def close(a: Any, b: Any) -> str:
    """`equal` bit for bit (a zero of either sign, any NaN), `rounding`, or `different`."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return "equal" if a == b else "different"
    if a.shape != b.shape or a.dtype != b.dtype:
        return "different"
    a, b = a.detach(), b.detach()
    if a.numel() == 0 or bool(((a == b) | ((a != a) & (b != b))).all()):
        return "equal"
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return "different"
    narrow = a.dtype in (torch.bfloat16, torch.float16)
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    a, b = a.to(wide), b.to(wide)
    finite = torch.isfinite(a)
    scale = float(a[finite].abs().max()) if bool(finite.any()) else 0.0
    tolerance = 2e-2 if narrow else 1e-4
    noise = 1e-5 + tolerance * scale  # a gradient that is nought in exact numbers is noise of that size
    return "rounding" if torch.allclose(a, b, rtol=tolerance, atol=noise, equal_nan=True) else "different"


__all__ = ["INPUTS", "OPERATOR", "ORDERS", "OURS", "STEPS", "STOCK", "Answers", "Failed"]
