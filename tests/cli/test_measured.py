"""The commands `validate` and `calibrate`: what they print, and one clear line for every mistake."""

import json
import re
from pathlib import Path

import pytest

from hardware.test_nccl_log import NEW
from shardplan.cli import run_command
from shardplan.hardware.measured.samples import parse_rows
from shardplan.hardware.prices.library import library, parse_library

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
    assert printed.err == "system 'ours' is not known: its fabric has the default latency and delivered rate\n"


def test_validate_reads_a_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["validate", str(log), "--nics", "8x400", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["skipped"], found["unknown_systems"]) == (4, [], ["alpha"])
    assert [(one["op"], one["nodes"], one["count"]) for one in found["strata"]] == [
        ("all_gather", "several", 2), ("all_gather", "several", 2),
    ]  # fmt: skip


def test_calibrate_writes_a_table_that_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.toml"
    assert run_command(["calibrate", str(ROWS), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = parse_rows(ROWS.read_text())
    ours = [one for one in rows if one.library_name == "nccl"]
    held = sum(one.held_out for one in ours)
    assert re.fullmatch(rf"fitted   \d+ constants of library nccl on {len(ours)} rows", lines[0])
    errors = r"median error (\S+) % before, (\S+) % after"
    before, after = re.fullmatch(rf"held out {held} rows of other curves: {errors}", lines[1]).groups()  # type: ignore[union-attr]
    assert 0 < float(after) < 100 and 0 < float(before) < 100
    told = " ".join(" ".join(lines[2:]).split())
    assert re.match(rf"kept .+: the rows do not determine them skipped {len(rows) - len(ours)}, such as ", told)
    fitted = parse_library(out.read_text())
    assert fitted.measured.startswith(f"{len(ours)} rows of collectives_sample.jsonl, from ")
    assert fitted != library("nccl") and fitted.algorithms() == library("nccl").algorithms()
    # The table written is one to start from, and its constants one to price by.
    assert run_command(["calibrate", str(ROWS), "--library", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["library"], found["rows"], found["held_out"]) == ("nccl", len(ours), held)
    assert parse_library(found["table"]).name == "nccl"


def test_calibrate_on_one_log_says_what_it_leaves(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log of an all-gather on two nodes says nothing of trees, of NVLS and of groups in a node."""
    assert run_command(["calibrate", str(log), "--nics", "8x400", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["held_out"], found["median_error_percent_after"]) == (4, 0, None)
    before, after = library("nccl"), parse_library(found["table"])
    assert 0 < found["constants"] < len(found["undetermined"])
    for old, new in zip(before.rows, after.rows, strict=True):
        if old.algorithm in ("nvls", "tree"):
            assert (new.base, new.algorithm) == (old.base, old.algorithm)


def test_calibrate_on_rows_of_another_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["calibrate", str(ROWS), "--library", "ring"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(
        r"shardplan: none of \d+ rows can be used for library 'ring'; \S+: measured of library 'nccl'\n", printed.err
    )


@pytest.mark.parametrize("command", ["validate", "calibrate"])
@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, (), "cannot read {path}: No such file or directory"),
        (b"\xff", (), "{path} is no UTF-8 text at its byte 0; legal is rows of JSON, or a log of nccl-tests"),
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
