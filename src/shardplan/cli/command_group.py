"""The group of all commands: six in front, the others behind them; a line and an example of each.

`move` and `convert` are the words of those in front for what the older names do: `move` is `redistribute` where types
are given and `refit` where sides of weights are, `convert` is `reshard`.
"""

from __future__ import annotations

import re
from typing import Any, TypedDict

from typer.core import TyperGroup

from shardplan.report.fold import WIDTH, fold_shell

FRONT = ("plan", "audit", "move", "convert", "show", "run")
MORE = "More commands"
MARGIN = 2  # what a help puts in front of an example
_TYPE = re.compile(r"\s*\w+\[")  # of `f32[64, 48]`
# What the list of commands says of each, within a line of 80 columns, and one line that works; those that read a file
# of another's go behind it.
COMMANDS = {
    "plan": (
        "Find the best strategy of training or serving, or judge one.",
        "shardplan plan llama3-8b --on dgx-h100 --nodes 4 --batch 128",
    ),
    "audit": (
        "Say how a launch is placed, what it costs, and mend it.",
        "shardplan audit --on dgx-h100 --nodes 4 --mesh data=4,tensor=8 --traffic tensor=2GB",
    ),
    "move": (
        "Plan a move of arrays, or of a model's weights.",
        'shardplan move "f32[64@data, 48]" "f32[64, 48@data]" --mesh data=4',
    ),
    "convert": (
        "Write a checkpoint as another framework stores it.",
        "shardplan convert llama llama-served --to vllm,tp=2",
    ),
    "show": (
        "Print a plan, a program or a type, and draw it.",
        'shardplan show "f32[6@data, 4]" --mesh data=2',
    ),
    "run": (
        "Run a plan or a program, here or on a launcher's processes.",
        "shardplan run plan.json",
    ),
    "redistribute": (
        "Plan how arrays get from one sharding to another.",
        'shardplan redistribute "f32[64@data, 48]" "f32[64, 48@data]" --mesh data=4 --out plan.json',
    ),
    "refit": (
        "Plan how weights get from a trainer to a server.",
        "shardplan refit megatron,tp=2 vllm,tp=4 --config llama",
    ),
    "check": (
        "Prove a plan without the planner, and run it.",
        "shardplan check plan.json",
    ),
    "simulate": (
        "Simulate a plan event by event; its timeline.",
        "shardplan simulate plan.json --on dgx-h100 --nodes 1 --out trace.json",
    ),
    "why": (
        "Say who asks for a movement, and what removes it.",
        "shardplan why plan-8b stage 0",
    ),
    "fuse": (
        "Fuse collectives into computations where that pays.",
        "shardplan fuse llama3-8b --on dgx-h100 --nodes 1 --strategy tensor=8 --batch 8 --cache 1024",
    ),
    "place": (
        "Rank the placements of a mesh on a cluster.",
        "shardplan place --on dgx-h100 --nodes 4 --mesh data=4,tensor=8 --traffic tensor=2GB,data=500MB",
    ),
    "reduce": (
        "Find the best program that reduces over axes.",
        "shardplan reduce data --on dgx-h100 --nodes 2 --mesh data=16 --bytes 1GB",
    ),
    "reshard": (
        "The older name of convert.",
        "shardplan reshard llama llama-served --to vllm,tp=2",
    ),
    "apply": (
        "Apply what convert wrote with --changed-since.",
        "shardplan apply llama-delta llama-served llama-served-2",
    ),
    "diff": (
        "Compare two checkpoints, whatever their storage.",
        "shardplan diff llama llama-served",
    ),
    "derive": (
        "Derive a table of weights from a model class's loader.",
        "shardplan derive LlamaForCausalLM --out mine.toml",
    ),
    "topologies": (
        "List the clusters and libraries that ship.",
        "shardplan topologies",
    ),
    "validate": (
        "Compare predictions with measured rows.",
        "shardplan validate rows.jsonl",
    ),
    "calibrate": (
        "Fit a library's table, or a machine, to measured rows.",
        "shardplan calibrate rows.jsonl --library nccl --out library.toml",
    ),
    "measure": (
        "Time this machine under torchrun, for plan --params.",
        "shardplan measure --on dgx-h100 --nodes 1 --out mine.toml",
    ),
    "bench": (
        "Work out a table of the four papers' pages anew.",
        "shardplan bench fused_published",
    ),
    "lab": ("Run programs on an emulated cluster on this machine.", "shardplan lab --help"),
    "lab run": (
        "Run a program beside its prediction.",
        "shardplan lab run plan.json --cluster 2x2 --rates 100,1000",
    ),
    "lab sweep": (
        "Measure every placement and program of an experiment.",
        "shardplan lab sweep --cluster 2x2 --rates 100,1000 --mesh a=2,b=2 --axes a",
    ),
    "lab validate": (
        "Score the simulator on the results of sweeps.",
        "shardplan lab validate results.json",
    ),
}  # fmt: skip


class CommandHelp(TypedDict):
    """What typer's `command` takes of a command: its line in the list, and the end of its help."""

    short_help: str
    epilog: str


def command_help(command: str) -> CommandHelp:
    """Return a command's line in the list, and an example for the end of its help."""
    line, example = COMMANDS[command]
    return {"short_help": line, "epilog": f"\b\nExample:\n{fold_shell(f'  {example}', WIDTH - MARGIN)}"}


class CommandGroup(TyperGroup):
    """The commands in two lists, and `move`, which is one command or another by what it is given."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and its arguments; `move` of two types is `redistribute`, else `refit`."""
        if args[:1] == ["move"] and any(not word.startswith("-") for word in args[1:]):
            types = any(_TYPE.match(word) for word in args[1:])
            args = ["redistribute" if types else "refit", *args[1:]]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in front, and then the others."""
        front = [name for name in FRONT if name in self.commands]
        rest = [name for name in self.commands if name not in FRONT]
        for title, names in (("Commands", front), (MORE, rest)):
            wide = formatter.width - 6 - max(map(len, names))
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(wide)) for name in names])
