"""Lines of the answer of `plan`, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shardplan import Strategy
from shardplan.report.plan import BAR, judged_lines, memory_lines, strategy_words
from shardplan.report.text import run_text

PARTS = (("state", 20e9), ("gradients", 10e9), ("nothing", 0.0), ("at work in one layer, or the loss", 5e9))


def judged(memory: float) -> tuple[Any, Any]:
    held = SimpleNamespace(nbytes=35e9, parts=PARTS, rank=1)
    plan = SimpleNamespace(strategy=Strategy(), seconds=2.0)
    one = SimpleNamespace(held=held, plan=plan, interval=(1.5, 2.5), tokens_per_second=8000.0, mfu=0.25, causes=())
    device = SimpleNamespace(peak=lambda dtype: {"bf16": 1e15}[dtype])
    judge = SimpleNamespace(
        machine=SimpleNamespace(parameters=SimpleNamespace(context=1.0, fragmentation=1.0)),
        topology=SimpleNamespace(size=16, device=device), model=SimpleNamespace(fields={"dtype": "bf16"}),
        has_measurements=True, certifier=SimpleNamespace(memory=memory),
    )  # fmt: skip
    return one, judge


def lines(memory: float) -> list[str]:
    one, judge = judged(memory)
    return memory_lines(one, memory, judge)


def test_tokens_are_those_of_all_devices_and_of_one() -> None:
    told = judged_lines(*judged(60e9))
    assert told[1:4] == [
        "step      2 s, and 1.5 s to 2.5 s in nine of ten",
        "tokens    8,000 a second, 500 a device",
        "MFU       25.0 % of 1,000 TFLOP/s in bf16",
    ]
    assert told[-3:] == lines(60e9)[-3:]


def test_a_bar_has_a_letter_for_each_share_of_the_memory() -> None:
    told = lines(60e9)
    assert told[1].strip() == f"[{'s' * 20}{'g' * 10}{'w' * 5}{'.' * 25}]" and BAR == 60
    assert told[0].startswith("memory    35 GB of 60 GB on pipeline rank 1") and told[0].endswith("; 25 GB free")
    assert told[2].strip() == "s 20 GB state, g 10 GB gradients, w 5 GB at work in one layer, or the"


def test_what_is_too_much_fills_the_bar() -> None:
    told = lines(30e9)
    assert len(told[1].strip()) == BAR + 2 and "." not in told[1] and told[0].endswith("; 5 GB too much")


def test_fsdp_deals_out_all_whatever_zero_says() -> None:
    assert "optimizer state, gradients and parameters" in strategy_words(Strategy(data=4, fsdp=True, global_batch=8))


def test_a_run_says_what_it_was_compared_with() -> None:
    told = {
        ok: run_text({"outputs": [{"name": "y", "checksum": "c", "type": "t"}], "ok": ok}) for ok in (True, None, False)
    }
    assert told == {
        True: "%y  c  t\nok: every output that was only moved equals its input",
        None: "%y  c  t\nok: all replicas agree",
        False: "%y  c  t\nthe outputs differ",
    }
