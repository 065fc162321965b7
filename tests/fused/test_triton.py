"""Triton's operators in its interpreter, on processes and on virtual ranks; and their text, compiled without a GPU."""

import os
import re
from importlib.util import find_spec
from typing import Any

import pytest
from tests.fused.forked import run, segments

from shardplan.errors import TypingError

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: shardplan[triton]")
OP = "gemm_all_to_all"
# Cases of one line share a process, which loads torch and Triton once.
CASES = (("words:3", "silent:3"), ("values:2", "wrong:2", "again:2"), ("values:3", "values:4"), ("virtual:8",))


class Said(dict[str, Any]):
    """What the child says of a case, which runs when it is first asked for."""

    def __missing__(self, case: str) -> Any:
        cases = next(each for each in CASES if case in each)
        self.update(zip(cases, run("triton_child", *cases, seconds=300), strict=True))
        assert [name for name in segments() if f"-{os.getuid()}-" in name] == []
        return self[case]


@pytest.fixture(scope="module")
def said() -> Said:
    return Said()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_values_on_processes(said: dict[str, Any], ranks: int) -> None:
    assert len(said[f"values:{ranks}"]) == ranks
    for each in said[f"values:{ranks}"]:
        assert each["wrong"] == [] and each["count"] == 24 and each["same"]
        assert 0 < each["error"] <= 1.4e-5


def test_values_on_virtual_ranks(said: dict[str, Any]) -> None:
    each = said["virtual:8"]
    assert each["wrong"] == [] and each["count"] == 8 * 20 and each["same"]


@pytest.mark.parametrize(("k", "op", "wait"), [
    (0, "gemv_all_reduce", "want 3, seen 2"), (1, OP, "want 3, seen 2"),
])  # fmt: skip
def test_a_signal_left_out_is_named(said: dict[str, Any], k: int, op: str, wait: str) -> None:
    """By a look at the heap, or by the next call; the call itself returns at once on a device."""
    first, second, third = (each[k] for each in said["silent:3"])
    text = rf"{op}: rank 1 waited 1\.0 s for tile 0 of rank 0 \(epoch 3: {wait}\)"
    assert re.fullmatch(f"FusedTimeout: {text}", second[0][0])
    assert second[0][1].startswith(f"FusedTimeout: {op}: failed before: ")
    for rank, each in ((0, first), (2, third)):
        assert re.fullmatch(
            rf"PeerLost: (symmetric heap triton silent gem.|{op}): rank {rank} ended: {text}", each[0][0]
        )
        assert re.fullmatch(rf"PeerLost: {op}: rank {rank} ended: {text}", each[0][1])
    assert first[1] and second[1] and third[1], "a reset makes it good again"


def test_kernels_that_are_wrong_are_seen(said: dict[str, Any]) -> None:
    """Altered sources, run by the same launches: a wait removed, a mask off by one, another epoch's slot."""
    assert [each[name] for each in said["wrong:2"] for name in ("mask", "slot")] == [True] * 4
    assert said["wrong:2"][0]["wait"] is True, "rank 0 reads before rank 1 has begun"
    assert [each["right"] for each in said["wrong:2"]] == [True, True]


def test_a_call_launched_again_is_another_epoch(said: dict[str, Any]) -> None:
    """As a graph that captured it does: the same launches with the same arguments, of operands that have changed."""
    assert said["again:2"] == [[True] * 6] * 2


def test_a_call_costs_the_host_little() -> None:
    """At 8,192 x 7,168 on four ranks, launches stubbed: at most 400 calls of Python, and none that waits."""
    for each in run("host_child", 4, seconds=200):
        assert each.pop("launches") > 0
        assert [name for name, case in each.items() if case["waits"]] == []
        assert max(case["calls"] for case in each.values()) <= 400


def test_words_of_users_kernels(said: dict[str, Any]) -> None:
    for rank, (adds, passed) in enumerate(said["words:3"]):
        assert adds == 300, "no contended add is lost"
        assert passed == [k + (rank - 1) % 3 + 1 for k in range(16)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    os.environ.pop("TRITON_INTERPRET", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        from benchmarks.fused_text import everything

        return everything()


def test_text_of_both_targets(text: dict[str, Any], said: dict[str, Any]) -> None:
    kernels = {"gemm", "gather", "grouped", "embedding", "gemv", "move", "read"}
    for target in ("sm_90", "gfx942"):
        assert {row["kernel"] for row in text["rows"] if row["target"] == target} == kernels
    assert len(text["rows"]) == 35
    assert [
        row for row in text["rows"] if not all(row[key] for key in row if key not in ("resources", "variant"))
    ] == []
    assert {row["kernel"] for row in text["rows"] if "wait" in row} == {"gather", "gemv", "read"}
    hashes = {row["source"] for row in text["rows"] if row["kernel"] == "gemm"}
    assert hashes == {said["values:2"][0]["source"]}, "the interpreter ran what was compiled"


def test_what_fits_on_a_processor(text: dict[str, Any]) -> None:
    """By registers and shared memory: nothing is spilled, and programs are as many as fit, of products one."""
    from shardplan.fused.triton.serving import FIT

    fit: dict[str, int] = {}
    for row in text["rows"]:
        name, has = row["kernel"], row["resources"]
        assert has["spilled"] == 0 and has["registers"] <= 256, row
        kind = {"gather": "gemm", "grouped": "gemm", "read": "move"}.get(name, name)
        fit[kind] = min(fit.get(kind, 99), has["fit"])
    assert fit == FIT


def nesting(ttir: str, what: str) -> list[int]:
    """In how many loops each line stands that a pattern is found in."""
    loops: list[bool] = []
    found: list[int] = []
    for line in ttir.splitlines():
        if re.search(what, line):
            found.append(sum(loops))
        for _ in range(line.count("}") - line.count("{") if line.lstrip().startswith("}") else 0):
            loops.pop()
        if line.rstrip().endswith("{"):
            if line.lstrip().startswith("}"):
                loops[-1:] = [loops[-1]]
            else:
                loops.append("scf.for" in line or "scf.while" in line)
    return found


def test_a_thin_product_reads_its_matrix_once(text: dict[str, Any]) -> None:
    """In the loops over rows of the schedule, tiles and depth, and in none over columns."""
    from benchmarks.fused_text import Variant, kernel, text_of

    wide = Variant(None, 2, (("wide", 16), ("lanes", 16)))
    ttir = text_of("gemv", "sm_90", kernel("gemv"), True, wide)["ttir"]
    assert nesting(ttir, r"tt\.load .*tensor<16x256x!tt\.ptr<bf16>>") == [3]
    assert nesting(ttir, r"tt\.dot ") == [3]


def test_tiles_are_chosen_by_what_is_left_to_the_busiest_processor() -> None:
    """The same for all rows of a class; of operands that descriptors do not fit another one; a timed shape first."""
    from shardplan.fused.triton import product_tiles
    from shardplan.fused.triton.product_tiles import choose_tile, product_table

    large = choose_tile("cuda", 2, True, 132, 8, 8192, 4096, 2048)
    assert large.block == (128, 256, 64) and large.described
    assert choose_tile("cuda", 2, False, 132, 8, 8192, 4096, 2048)[::3] == ((128, 128, 64), False)
    assert choose_tile("cuda", 2, True, 132, 8, 16, 64, 2048).block == (64, 64, 64)  # one tile a processor, no larger
    assert choose_tile("hip", 2, True, 304, 8, 8192, 4096, 2048)[::3] == ((128, 128, 64), False)
    assert choose_tile("cuda", 4, True, 132, 8, 8192, 4096, 2048).block == (128, 128, 16)
    timed = {"target": "cuda", "bytes": 2, "described": True, "blocks": 8, "shape": [8192, 4096, 2048],
             "block": [64, 128, 64], "warps": 4, "stages": 4}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_tiles, "product_table", lambda: product_table() | {"timed": [timed]})
        assert choose_tile.__wrapped__("cuda", 2, True, 132, 8, 8192, 4000, 2048).block == (64, 128, 64)
        assert choose_tile.__wrapped__("cuda", 2, True, 132, 4, 8192, 4096, 2048).block == (128, 256, 64)


def test_what_a_descriptor_cannot_say_has_none() -> None:
    """Rows of other than 16 bytes, and steps that read behind a product of several; else both operands have one."""
    import torch

    from shardplan.fused.triton import ProductTile

    tile = ProductTile((16, 16, 32), described=True)
    for depth, columns, products, described in (
        (32, 16, 1, True), (40, 16, 1, True), (40, 16, 2, False), (64, 16, 2, True), (33, 16, 1, False),
        (32, 9, 1, False),
    ):  # fmt: skip
        a, b = torch.ones(8, depth).bfloat16(), torch.ones(products, depth, columns).bfloat16()
        says, (x, y) = tile.operands(a, b, products)
        assert says == {"described": described}
        if described:
            assert (x.shape, x.block_shape) == ([8, depth], [16, 32])
            assert (y.shape, y.strides, y.block_shape) == ([products * depth, columns], [columns, 1], [32, 16])
    assert ProductTile((16, 16, 32)).operands(torch.ones(8, 32), torch.ones(1, 32, 16), 1)[0] == {"described": False}


def test_text_of_altered_kernels_fails(text: dict[str, Any]) -> None:
    assert len(text["controls"]) == 18
    assert [row for row in text["controls"] if row["fails"] != sorted(row["must"].split())] == []


def test_stamps_are_of_the_clock(text: dict[str, Any]) -> None:
    from benchmarks.fused_text import KERNELS, kernel, text_of

    assert "globaltimer" not in text_of("gemm", "sm_90", kernel("gemm"))["ptx"]
    constants = KERNELS["gemm"]["constants"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, "gemm", KERNELS["gemm"] | {"constants": constants | {"stamped": 4}})
        assert "globaltimer" in text_of("gemm", "sm_90", kernel("gemm"))["ptx"]


def test_targets_are_named() -> None:
    from shardplan.fused.triton.compile_ahead import compile_kernel
    from shardplan.fused.triton.gemv_kernel import gemv_kernel

    with pytest.raises(TypingError, match="kernel gemv_kernel for sm_70; legal are sm_90, gfx942, without"):
        compile_kernel(gemv_kernel, {}, {}, "sm_70")


@pytest.mark.parametrize(
    ("scatter", "parts", "says"),
    [
        (1, [3, 3], "parts [3, 3]; legal are 2 integers from 0 that sum to 4"),
        (1, [4], "parts [4]; legal are 2 integers from 0 that sum to 4"),
        (0, [2, 2], "parts [2, 2] of blocks of rows; legal with scatter 0 are none"),
    ],
)
def test_parts_of_columns_are_used_or_refused(scatter: int, parts: list[int], says: str) -> None:
    import torch

    from shardplan.fused.triton import TileMemory, gemm_all_to_all

    operands = (torch.ones(8, 3), torch.ones(2, 3, 4), None, [[2, 2]] * 2 if scatter == 0 else [[4]] * 2, scatter)
    with pytest.raises(TypingError) as refused:
        gemm_all_to_all(TileMemory.virtual(2, 1 << 16), *operands, parts=parts)
    assert str(refused.value) == f"{OP}: {says}"
