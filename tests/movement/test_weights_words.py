"""Words of frameworks: the table that each means, degrees in a table's own names, and the nearest that fit."""

from __future__ import annotations

from typing import Any

import pytest

from shardplan.errors import LayoutError
from shardplan.movement.weights.frameworks import check_expert_degree, nearest_degrees, spell_degrees, table_name

SHIPPED = (
    "hf-llama", "hf5-llama", "vllm-llama", "vllm-llama-fp8", "vllm-mixtral", "vllm-mixtral-ep", "megatron-llama",
    "megatron-dist-llama", "megatron-stacked-llama", "torchtitan-llama", "torchtitan-llama-split", "fsdp2-llama",
    "fsdp2-peft-llama", "peft-llama",
)  # fmt: skip


@pytest.mark.parametrize(
    ("word", "model", "more", "table"),
    [
        ("hf", "llama", {}, "hf5-llama"),
        ("hf", "llama", {"disk": True}, "hf-llama"),
        ("dcp", "llama", {"disk": True}, "fsdp2-llama"),
        ("vllm", "llama", {"switches": ("fp8",)}, "vllm-llama-fp8"),
        ("vllm", "mixtral", {"degrees": {"ep": 4}}, "vllm-mixtral-ep"),
        ("vllm", "mixtral", {"degrees": {"expert_parallel_size": 1}}, "vllm-mixtral"),
        ("vllm", "llama", {"degrees": {"ep": 4}}, "vllm-llama"),
        ("megatron", "llama", {}, "megatron-llama"),
        ("megatron", "llama", {"disk": True}, "megatron-dist-llama"),
        ("megatron", "llama", {"switches": ("stacked",)}, "megatron-stacked-llama"),
        ("torchtitan", "llama", {}, "torchtitan-llama"),
        ("torchtitan", "llama", {"switches": ("split",)}, "torchtitan-llama-split"),
        ("torchtitan", "llama", {"disk": True}, "torchtitan-llama-split"),
        ("torchtitan", "llama", {"disk": True, "switches": ("fused",)}, "torchtitan-llama"),
        ("vllm", "llama", {"adapter": True, "disk": True}, "peft-llama"),
        ("vllm", "llama", {"adapter": True}, "fsdp2-peft-llama"),
    ],
)
def test_a_word_means_one_table(word: str, model: str, more: dict[str, Any], table: str) -> None:
    given: dict[str, Any] = {"degrees": {}} | more
    assert table_name(word, model, SHIPPED, **given) == table


def test_experts_are_cut_over_data_and_tensor_or_not_at_all() -> None:
    degrees = {"tensor": 4, "data": 2}
    for ep in (1, 8):
        assert check_expert_degree("vllm-mixtral-ep", degrees | {"ep": ep}) == degrees
    with pytest.raises(LayoutError, match="ep = 4; legal is 8, which is tp x dp, or none"):
        check_expert_degree("vllm-mixtral-ep", degrees | {"ep": 4})
    with pytest.raises(LayoutError, match="legal is 1,"):
        check_expert_degree("vllm-llama", degrees | {"expert_parallel_size": 8})


def test_a_degree_has_one_value_under_all_of_its_names() -> None:
    assert spell_degrees({"dp": 2, "tp": 4}, ("data", "replica", "tensor")) == {"data": 2, "tensor": 4}
    with pytest.raises(LayoutError, match="tensor is given twice, once as tp; legal is once"):
        spell_degrees({"tensor": 4, "tp": 4}, ("tensor",))


@pytest.mark.parametrize(("value", "legal"), [(5, "legal are 4 and 6"), (7, "legal are 6 and 12"), (13, "legal is 12")])
def test_the_nearest_degrees_on_both_sides_are_said(value: int, legal: str) -> None:
    """Of those that divide 12; above twice the wrong one none is sought."""

    def fits(degrees: dict[str, int]) -> None:
        if 12 % degrees["tensor"]:
            raise LayoutError("no")

    told = nearest_degrees(LayoutError("w = 12; legal is another"), {"tensor": value, "pipeline": 1}, fits, "vllm")
    assert str(told) == f"vllm: tensor = {value}: w = 12; {legal}, the nearest"
