"""The prepared refit on real processes of gloo, against the plan's reference."""

import json
import os
import random
import socket
import time
from pathlib import Path

import pytest

from execution.shared_memory import shared_files
from execution.torch_launch import Launch, launch

CHILD = Path(__file__).with_name("refit_child.py")


def free_store(secret: str = "") -> str:
    """The text of a store at a port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://{secret}127.0.0.1:{server.getsockname()[1]}"


def run(kind: str, ranks: int = 4, **arguments: object) -> str:
    status, out, err = launch(ranks, CHILD, kind, json.dumps(arguments), seconds=120)
    assert status == 0, err[-4000:]
    return out


@pytest.mark.parametrize("limit", [None, 20_000, 2_000])
@pytest.mark.parametrize(("wide", "narrow"), [("f32", "bf16"), ("bf16", "f32"), ("bf16", "bf16")])
def test_what_arrives_is_what_the_reference_says(limit: int | None, wide: str, narrow: str) -> None:
    run("equal", colocated=False, limit=limit, wide=wide, narrow=narrow)


@pytest.mark.parametrize("limit", [None, 2_000])
def test_colocated_models_copy_in_place_what_stays(limit: int | None) -> None:
    run("equal", 2, colocated=True, limit=limit, wide="f32", narrow="bf16")


@pytest.mark.parametrize("limit", [None, 2_000])
def test_receivers_of_a_node_pass_on_what_one_of_them_got(limit: int | None) -> None:
    run("equal", colocated=False, limit=limit, wide="f32", narrow="bf16", relay=True)


@pytest.mark.parametrize(("relay", "changed"), [(False, False), (True, True)])
def test_the_second_call_plans_agrees_and_allocates_nothing(relay: bool, changed: bool) -> None:
    run("counted", relay=relay, changed=changed)


def test_a_rank_with_another_plan_is_named_on_all() -> None:
    lines = set(run("stale").strip().splitlines())
    assert lines == {
        "refit megatron-llama to vllm-llama: rank 3 of 4 ranks came with another plan: its memory limit is 10000, on "
        "rank 0 it is None; legal is one plan on all ranks, and nothing was sent"
    }


def test_a_module_of_fsdp2_is_served_after_every_step() -> None:
    status, _, err = launch(4, CHILD.with_name("refit_fsdp2_child.py"), seconds=120)
    assert status == 0, err[-4000:]


def test_sides_that_know_only_themselves_join() -> None:
    run("joined", store=free_store())


def test_a_transfer_engine_takes_plain_dicts_and_some_names() -> None:
    run("engine", store=free_store())


@pytest.mark.parametrize("victim", [1, 2, 0, 3])
def test_a_killed_rank_is_named_and_the_next_full_refit_is_right(victim: int) -> None:
    job = Launch(4, CHILD, "killed", json.dumps({"victims": [victim]}))
    try:
        until = time.monotonic() + 60
        while job.said(".out").count("ready") < 4:
            assert time.monotonic() < until, job.said(".err")[-3000:]
            time.sleep(0.05)
        time.sleep(random.Random(victim).uniform(0.05, 0.3))
        shared = shared_files(rank.pid for rank in job.ranks)
        job.ranks[victim].kill()
        while job.said(".out").count("failed") < 3:
            assert time.monotonic() < until, job.said(".err")[-3000:]
            time.sleep(0.05)
        job.again(victim)
        job.wait(60)
        assert job.status == 0, job.said(".err")[-3000:]
        assert job.said(".out").count("recovered") == 3, job.said(".out")
        again = (job.output / f"{victim}-again.out").read_text()
        assert "recovered" in again
        assert not [name for name in shared if os.path.exists(name)]
    finally:
        job.end()
