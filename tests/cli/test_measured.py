"""The commands `validate` and `calibrate`: what they print, and one clear line for every mistake."""

import json
from pathlib import Path

import pytest

from hardware.test_nccl_log import NEW
from shardplan.cli import run_command

ROWS = Path(__file__).parents[1] / "data" / "collectives_sample.jsonl"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "alpha.log"
    path.write_text(NEW)
    return path


def test_validate_prints_the_issue_s_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["validate", str(ROWS), "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert list(found) == ["rows", "strata", "skipped", "unknown_systems"] and printed.err == ""
    assert found["rows"] == len(ROWS.read_text().splitlines())
    assert [list(one) for one in found["strata"]] == [[
        "library", "op", "nodes", "bytes_from", "bytes_to", "count", "median_error_percent", "p90_error_percent",
        "within_15_percent", "within_20_percent", "within_factor_1_5_percent",
    ]] * len(found["strata"])  # fmt: skip
    assert all(list(one) == ["id", "reason"] for one in found["skipped"])


def test_validate_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"id": "a", "library": "nccl", "op": "all_reduce", "gpu": "H100", "nodes": 2, "gpus_per_node": 8,
           "nics_per_node": 8, "nic_gbps": 400, "bytes": 1024, "seconds": 2e-5, "system": "ours"}  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row | more) for more in ({}, {"gpu": "X"}, {"gpu": "X", "id": "b"})))
    assert run_command(["validate", str(path)]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split()[:5] == ["library", "op", "nodes", "bytes", "rows"]
    assert lines[1].split()[:7] == ["nccl", "all_reduce", "several", "to", "64", "KiB", "1"]
    assert lines[3] == "3 rows, 2 skipped"
    assert lines[4].startswith("skipped  2, such as a: GPU 'X' is unknown; legal: V100, A100")
    assert printed.err == "system 'ours' is not known: its fabric has the default latency and the whole rate\n"


def test_validate_reads_a_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["validate", str(log), "--nics", "8x400", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["skipped"], found["unknown_systems"]) == (4, [], ["alpha"])
    assert [(one["op"], one["nodes"], one["count"]) for one in found["strata"]] == [
        ("all_gather", "several", 2), ("all_gather", "several", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["validate"])
@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, (), "{path}: No such file or directory"),
        (b"\xff", (), "{path} is no UTF-8 text; legal are rows of JSON and logs of nccl-tests"),
        (b"{}", (), "rows.log, line 1: Object missing required field `id`; legal is a row of a measured collective, as "
         "one object"),
        (b'{"model": {}}', (), "rows.log, line 1: rows of measured training are not read yet; legal are rows of "
         "measured collectives"),
        (b"hello", (), "rows.log has no table of times; legal is the output of nccl-tests or rccl-tests"),
        (NEW.encode(), (), "rows.log ran on 2 nodes; say the NICs of a node and their Gbit/s, such as 8x400"),
        (NEW.encode(), ("--nics", "8"), "--nics '8': legal is the NICs of a node and the Gbit/s of each, such as "
         "8x400"),
        (ROWS.read_bytes(), ("--gpu", "H100"), "--gpu, --op, --gpus-per-node, --nics and --system are of logs; rows of "
         "JSON say all of it"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    command: str,
    text: bytes | None,
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "rows.log"
    if text is not None:
        path.write_bytes(text)
    assert run_command([command, str(path), *options]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"shardplan: {message.format(path=path)}\n")
