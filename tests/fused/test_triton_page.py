"""The fourth operator, as docs/fuse.md writes it: short, of public names only, right, with gradients."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.fused.forked import run

import shardplan.fused

PAGE = Path(__file__).parents[2] / "docs" / "fuse.md"
CODE = re.search(r"two and on three processes -->\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: shardplan[triton]")


def code() -> str:
    assert CODE is not None
    return CODE[1]


def test_it_is_short_and_of_public_names() -> None:
    assert len([line for line in code().splitlines() if line.strip()]) < 80
    names = {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(code()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {module for module, _ in names} == {"shardplan.fused", "shardplan.fused.triton"}
    assert {name for module, name in names if module == "shardplan.fused"} <= set(shardplan.fused.__all__)


@needs_triton
def test_it_is_right(tmp_path: Path) -> None:
    import shardplan.fused.triton as ours

    assert set(re.findall(r"shardplan\.fused\.triton import (.*)", code())[0].split(", ")) <= set(ours.__all__)
    path = tmp_path / "page_operator.py"
    path.write_text(code())
    for ranks, found in zip((2, 3), run("page_child", path, 2, 3, seconds=200), strict=True):
        assert len(found) == ranks
        assert all(isinstance(errors, list) and len(errors) == 9 and max(errors) < 2e-5 for errors in found), found
