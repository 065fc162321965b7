"""The commands refit, reshard and diff: what they print, and their exit status."""

import json
from pathlib import Path

import pytest

from cli.command_call import call
from interop.checkpoint_cases import CONFIG, plain, read, whole
from shardplan.interop import safetensors
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.weights import Weights

MEGATRON = "megatron-llama,tensor=2,pipeline=2,stages=[1,2],divisible=4"


def test_reshard_there_and_back_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = plain(tmp_path / "hf")
    there = ("reshard", source, tmp_path / "mega", "--from", "hf-llama", "--to", MEGATRON)
    status, out, _ = call(capsys, *there, "--dry-run")
    assert status == 0 and out.endswith("nothing was written\n") and not (tmp_path / "mega").exists()
    told = "  model-00003-of-00004.safetensors  37.5 kB\n      needs head[v=0:48], norm, norm1[l=1:3],"
    assert told in out and all(len(line) <= 80 for line in out.splitlines())
    status, out, err = call(capsys, *there)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "source      hf-llama f32, 1 device"
    assert lines[1:3] == [
        "target      megatron-llama f32, 4 devices (tensor=2, pipeline=2, divisible=4),",
        "            form devices",
    ]
    assert lines[4] == f"  {{c}}.embedding.word_embeddings.weight{'11.5 kB':>42}"
    assert lines[5] == "      f32[embed = v, e] -> f32[(embed: v | 0: pad)@tensor, e]"
    assert lines[-1].startswith("written     ") and lines[-1].endswith("/s")
    status, out, _ = call(capsys, *there)  # all is there: nothing more is written
    assert status == 0 and "; 4 were finished\n" in out and out.splitlines()[-1].startswith("written     0 B in ")
    status, out, _ = call(capsys, "reshard", tmp_path / "mega", tmp_path / "back", "--to", "hf-llama", "--json")
    found = json.loads(out)
    assert status == 0 and found["files"][0]["name"] == "model.safetensors" and found["total_bytes"] > 0
    (again,) = read(tmp_path / "back")
    assert all(again[n].tobytes() == a.tobytes() for n, a in whole().items())


def test_diff_has_a_status_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = plain(tmp_path / "a"), plain(tmp_path / "b")
    assert call(capsys, "diff", a, b) == (0, "equal: 30 parameters, 29024 elements\n", "")
    named = whole()
    named["model.norm.weight"][3] += 1
    safetensors.write(b / "model.safetensors", named)
    status, out, _ = call(capsys, "diff", a, b, "--table", "hf-llama", "--json")
    assert status == 1 and json.loads(out)["difference"]["index"] == [3]


def test_refit_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = plain(tmp_path / "hf") / "config.json"
    status, out, err = call(capsys, "refit", MEGATRON, "vllm-llama,tensor=2", "--config", config)
    a = Weights.load("megatron-llama", CONFIG, tensor=2, pipeline=2, stages=[1, 2], divisible=4)
    plan = refit(a, Weights.load("vllm-llama", CONFIG, tensor=2, devices=[4, 5]))
    assert (status, err) == (0, "") and out.splitlines()[0] == f"refit       {plan.hash}"
    assert all(len(line) <= 80 for line in out.splitlines())
    status, out, _ = call(
        capsys, "refit", MEGATRON, "vllm-llama,tensor=2,devices=4:6", "--config", config, "--json", "--only", "gate"
    )
    found = json.loads(out)
    assert status == 0 and [m["tensor"] for m in found["moves"]] == ["gate"]
    assert Weights.parse(found["target"]["text"]).devices == (4, 5)
    narrow = call(capsys, "refit", MEGATRON, "vllm-llama,tensor=2", "--config", config, "--dtype", "bf16", "--json")[1]
    whole = call(capsys, "refit", MEGATRON, "vllm-llama,tensor=2", "--config", config, "--json")[1]
    sizes = [sum(m["bytes"] for m in json.loads(x)["moves"]) for x in (narrow, whole)]
    assert 2 * sizes[0] == sizes[1] > 0  # of the target's dtype
    texts = tmp_path / "a.toml", tmp_path / "b.toml"
    texts[0].write_text(str(plan.source))
    texts[1].write_text(str(plan.target))
    assert call(capsys, "refit", *texts)[1].splitlines()[0] == f"refit       {plan.hash}"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("hf", "x", "--to", "vlm,tp=2"), 2,
         "--to: a table of weights 'vlm' is no file and is not shipped; the nearest is vllm; legal are hf, vllm, "),
        (("hf", "x", "--to", "vllm,tp=3"), 2,
         "--to: vllm-llama: tensor = 3: it does not divide 128 of model.embed_tokens.weight; legal are 2 and 4, the "),
        (("hf", "x", "--from", "hf-llama", "--to", "vllm-llama,tensor=two"), 2,
         "--to: 'tensor=two'; legal is a degree, as tp=2, stages=[2,1] or devices=8:16, or one of fp8, "),
        (("hf", "x", "--from", "hf-llama", "--to", "vllm-llama,rank=2"), 2,
         "--to: vllm-llama has no degree rank; legal are tensor, pipeline, replica"),
        (("hf", "x", "--from", "hf-llama", "--to", "vllm-llama", "--memory-limit", "1MB"), 3,
         "reshard within 1 MB: no way; the least that works is "),
        (("hf", "x", "--from", "hf-llama", "--to", "both.toml"), 2,
         "both.toml has [layouts] and parameters; legal is a file of layouts, or a table of weights"),
        (("none", "x", "--from", "hf-llama", "--to", "hf-llama"), 2,
         "none: there is no such file or folder; legal is a checkpoint"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    status: int,
    message: str,
) -> None:
    plain(tmp_path / "hf")
    (tmp_path / "both.toml").write_text('mesh = ["a"]\n[layouts]\n[[parameters]]\nname = "w"\nis = "w = a"\n')
    monkeypatch.chdir(tmp_path)
    found, out, err = call(capsys, "reshard", *arguments)
    assert (found, out) == (status, "") and err.startswith(f"shardplan: {message}") and err.count("\n") == 1
    assert not (tmp_path / "x").exists()
