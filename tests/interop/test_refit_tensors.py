"""What a refit binds of a live module, how it cuts what ranks exchange, and versions that are served."""

import numpy as np
import pytest
import torch

from shardplan.errors import BackendError, Infeasible, LayoutError
from shardplan.interop.torch.refit.chunks import chunks, slots
from shardplan.interop.torch.refit.commit import served_by
from shardplan.interop.torch.refit.exchange import RefitExchange
from shardplan.interop.torch.refit.hops import RefitHop
from shardplan.interop.torch.refit.tensors import BoundTensors
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.regions import RefitRegions
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import Weights, make_weights

CONFIG = {
    "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "vocab_size": 10, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
HF = Weights.load("hf-llama", CONFIG)


def module(weights: Weights, **skip: int) -> torch.nn.Module:
    root = torch.nn.Module()
    for name, shape, _ in weights.parameters(weights.devices[0]):
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at._modules[part]
        at.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))
    return root


def test_a_module_is_bound_by_its_parameters_and_buffers_may_be_more() -> None:
    model = module(HF)
    model.model.layers.add_module("rotary", torch.nn.Module())
    model.model.layers.rotary.register_buffer("inv_freq", torch.zeros(3))
    bound = BoundTensors(HF, model, 0, "source")
    assert [b.local.data_ptr() for b in bound.held] == [
        dict(model.named_parameters())[n].data_ptr() for n in HF.names(0)
    ]


def test_every_misfit_is_said_at_once() -> None:
    model = module(HF)
    model.model.norm.weight = torch.nn.Parameter(torch.zeros(7))
    del model.lm_head.weight
    model.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(LayoutError) as error:
        BoundTensors(HF, model, 0, "target")
    assert str(error.value) == (
        "rank 0 of hf-llama, target: 1 missing (lm_head.weight); 1 additional (more); 1 misshapen (model.norm.weight "
        "is [7], legal is [8])"
    )


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(8, dtype=torch.bfloat16), "is torch.bfloat16; legal is torch.float32, as the weights say"),
        (torch.zeros(16)[::2], "has strides (2,); legal is a contiguous tensor with memory"),
        (torch.zeros(8, device="meta"), "has strides (1,); legal is a contiguous tensor with memory"),
    ],
)
def test_what_cannot_be_written_in_place_is_refused(tensor: torch.Tensor, message: str) -> None:
    model = module(HF)
    model.model.norm.weight = torch.nn.Parameter(tensor)
    with pytest.raises(LayoutError) as error:
        BoundTensors(HF, model, 0, "target")
    assert str(error.value) == f"rank 0 of hf-llama, target: model.norm.weight {message}"


def test_tied_tensors_and_chunks_and_compiled_modules() -> None:
    tied = Weights.load("hf-llama", CONFIG | {"tie_word_embeddings": True})
    model = module(HF)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert len(BoundTensors(tied, model, 0, "source").held) == len(HF.names(0)) - 1
    chunked = Weights.load("megatron-llama", CONFIG, divisible=2)
    held = {n.removeprefix("0."): torch.nn.Parameter(torch.zeros(s)) for n, s, _ in chunked.parameters(0)}
    part = torch.nn.Module()
    for name, x in held.items():
        *path, last = name.split(".")
        at = part
        for step in path:
            if step not in at._modules:
                at.add_module(step, torch.nn.Module())
            at = at._modules[step]
        at.register_parameter(last, x)
    BoundTensors(chunked, [part], 0, "source")
    wrapped = torch.nn.Module()
    wrapped.add_module("_orig_mod", module(HF))
    BoundTensors(HF, wrapped, 0, "source")


def test_a_parameter_that_was_replaced_is_bound_again() -> None:
    model = module(HF)
    bound = BoundTensors(HF, model, 0, "target")
    assert not bound.rebind_moved()
    model.model.norm.weight = torch.nn.Parameter(torch.ones(8))
    assert bound.rebind_moved() and not bound.rebind_moved()
    at = HF.names(0).index("model.norm.weight")
    assert bound.held[at].tensor is model.model.norm.weight
    model.model.norm.weight.data = torch.full((8,), 2.0)
    assert bound.rebind_moved() and bool((bound.held[at].local == 2).all())


@pytest.mark.parametrize("limit", [200, 1000, 10_000, None])
def test_messages_hold_every_element_once_within_their_slots(limit: int | None) -> None:
    a = Weights.load("megatron-llama", CONFIG, tensor=2, divisible=2)
    b = Weights.load("vllm-llama", CONFIG, tensor=2, devices=[2, 3])
    plan = refit(a, b, memory_limit=limit)
    size = slots(RefitHop(plan, False))
    held: dict[int, int] = {}
    for (s, t), n in size.items():
        held[s], held[t] = held.get(s, 0) + n, held.get(t, 0) + n
    assert limit is None or max(held.values()) <= limit
    for (s, t), slot in size.items():
        ends: list[list[tuple[int, ...]]] = []
        for rank in (s, t):
            found = plan.regions(rank)
            cut = chunks(RefitHop(plan, False), found.select_regions((found.source == s) & (found.target == t)), slot)
            assert all(c.nbytes <= slot for c in cut)
            rows = [
                (int(c.rows.source_parameter[k]), int(c.rows.source_offset[k]), *c.rows.sizes[k].tolist(), int(c.at[k]))
                for c in cut
                for k in range(len(c.rows))
            ]
            ends.append(rows)
            seen = np.concatenate([c.rows.elements for c in cut]).sum()
            here = (plan.traffic[0] == s) & (plan.traffic[1] == t)
            assert seen * 4 == plan.traffic[2][here].sum()
        assert ends[0] == ends[1]


def pairs(rows: RefitRegions) -> list[tuple[int, ...]]:
    """Every element by its parameter and its place on both sides."""
    found: list[tuple[int, ...]] = []
    for row in rows:
        at = np.indices(row.sizes).reshape(len(row.sizes), -1)
        source, target = row.source_offset + row.source_strides @ at, row.target_offset + row.target_strides @ at
        ends = zip(source.tolist(), target.tolist(), strict=True)
        found += [(row.source_parameter, row.target_parameter, *end) for end in ends]
    return found


@pytest.mark.parametrize("slot", [16, 48, 1 << 20])
def test_regions_that_are_cut_lead_every_element_to_its_place(slot: int) -> None:
    """One device holds whole what two have columns of, so that steps are other ones on each side."""
    a = Weights.load("megatron-llama", CONFIG, tensor=2, divisible=2)
    plan = refit(a, Weights.load("vllm-llama", CONFIG, devices=[2]))
    for source in (0, 1):
        found = plan.regions(source)
        assert (found.source_strides != found.target_strides).any()
        cut = chunks(RefitHop(plan, False), found, slot)
        assert sorted(pair for chunk in cut for pair in pairs(chunk.rows)) == sorted(pairs(found))


def test_a_limit_without_room_names_the_least() -> None:
    a = Weights.load("megatron-llama", CONFIG, tensor=2, divisible=2)
    plan = refit(a, Weights.load("vllm-llama", CONFIG, tensor=2, devices=[2, 3]), memory_limit=20)
    with pytest.raises(Infeasible) as error:
        slots(RefitHop(plan, False))
    assert error.value.least_bytes == 32
    assert str(error.value) == (
        "a refit within 20 B a rank: rank 2 needs 32 bytes for a message to or from each of its peers; legal is that "
        "or more"
    )
    assert max(slots(RefitHop(refit(plan.source, plan.target, memory_limit=32), False)).values()) == 16


@pytest.mark.parametrize("plus", [0, 1, -2])
def test_a_message_to_which_something_is_added_goes_through_staging(plus: int) -> None:
    """One contiguous run of a parameter, passed by hand from one rank's message to the other's."""

    def side(rank: int, more: dict[str, int]) -> Weights:
        data = {"mesh": [], "atoms": {"n": 6}, "of": {"tensors": {"q": "n"}},
                "parameters": [{"name": "q", "is": "q = n", **more}]}  # fmt: skip
        return make_weights(WeightTable.of(data, "a table"), {}, {}, range(rank, rank + 1), "f32")

    plan = refit(side(0, {}), side(1, {"plus": plus} if plus else {}))
    models = [torch.nn.Module(), torch.nn.Module()]
    for model in models:
        model.register_parameter("q", torch.nn.Parameter(torch.arange(6.0) * (model is models[0])))
    bound = BoundTensors(plan.source, models[0], 0, "source"), BoundTensors(plan.target, models[1], 1, "target")
    cpu = torch.device("cpu")
    (sent, _), (_, came) = (
        RefitExchange(plan, r, bound[0] if r == 0 else None, bound[1] if r else None, cpu).rounds[0] for r in range(2)
    )
    (given,), (taken,) = sent, came
    with torch.no_grad():
        given.copies.run()
        taken.data.copy_(given.data)
        taken.copies.run()
    wanted = plan.apply({0: {"q": np.arange(6, dtype=np.float32)}})[1]["q"]
    assert wanted.tolist() == [k - plus for k in range(6)]
    assert models[1].q.tolist() == wanted.tolist()


def test_a_version_is_that_of_the_tensors_and_not_of_a_handle() -> None:
    x = torch.zeros(1)
    first, again = served_by(x), served_by(x)
    first.succeed(3)
    assert again.served_version() == 3
    again.begin()
    with pytest.raises(BackendError, match="not served: a refit is under way"):
        first.served_version()
    again.fail(ValueError("torn\nmore"))
    assert first.torn
    with pytest.raises(BackendError) as error:
        first.served_version()
    assert str(error.value) == (
        "these weights are not served: the last refit failed: torn; legal is to serve after a full refit"
    )
