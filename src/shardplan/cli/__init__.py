"""The command line: every verb as a command, with `--json` on each, and one line for every mistake.

What the commands print is made in `report`. Reading order:

- `statuses`       the exit statuses, and how an error becomes one
- `command_group`  which commands are in front, a line and an example of each, what `move` means
- `options`        what the commands share: options, and how their texts are read
- `answers`        how they print what they found
- `plans`          the commands about plans: redistribute, check, show, run, simulate
- `searching`      the command plan: what it is given, a search, or one strategy judged
- `plan_folder`    what plan --out and --report write; what check, show and run do with it
- `why`            the command why: who asks for a movement; why a measured step is longer
- `fusing`         the command fuse
- `placing`        the commands about placements: place, reduce, audit, topologies
- `audit`          what `audit` does: a launch read from texts and files, and audited
- `measurements`   the commands about measured collectives: validate, calibrate
- `benching`       the command bench: tables of the papers' pages
- `measuring`      the command that times a machine: measure
- `weights`        the commands about weights: refit, reshard, apply, diff, derive
- `lab_commands`   the commands of the lab: run, sweep, validate
- `lab`            what they do: programs measured beside their prediction
- `bar`            on the terminal a progress bar, or a line with the time; and colour
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn

import typer

from shardplan.cli import lab_commands
from shardplan.cli.bar import CommandStream, begin_waiting, wants_colour
from shardplan.cli.benching import bench
from shardplan.cli.command_group import CommandGroup, command_help
from shardplan.cli.fusing import fuse
from shardplan.cli.measurements import calibrate, validate
from shardplan.cli.measuring import measure
from shardplan.cli.placing import audit, place, reduce, topologies
from shardplan.cli.plans import check, redistribute, run, show, simulate
from shardplan.cli.searching import plan
from shardplan.cli.statuses import (
    BROKEN_PIPE,
    DONE,
    EPILOGUE,
    FAILED,
    IMPOSSIBLE,
    INTERRUPTED,
    MISTAKE,
    asks_json,
    complain,
)
from shardplan.cli.weights import apply, derive, diff, refit, reshard
from shardplan.cli.why import why
from shardplan.errors import BackendError, Infeasible, MissingExtra, ShardplanError, TimedOut, line

_COMPLETION = "_SHARDPLAN_COMPLETE"
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException, which typer does not export

app = typer.Typer(
    name="shardplan",
    cls=CommandGroup,
    epilog=EPILOGUE,
    help="Plans, proves, predicts and runs how tensors are placed on, and moved across, a cluster of accelerators.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> NoReturn:
    """Run the command line and exit with its status; a warning is a line on stderr, too."""
    warnings.showwarning = _tell_warning
    arguments = sys.argv[1:]
    end = _open_streams(arguments)
    try:
        status = run_command(arguments)
    finally:
        end()
    sys.exit(status)


def _open_streams(arguments: Sequence[str]) -> Callable[[], None]:
    """Let what is written have colour, and say that a command is at work until it writes; return what ends that."""
    if _COMPLETION in os.environ:
        return lambda: None
    end = begin_waiting(sys.stderr, " ".join(arguments[:1]))
    for name, answers in (("stdout", True), ("stderr", False)):
        stream = getattr(sys, name)
        colour = wants_colour(stream) and not asks_json(arguments)
        setattr(sys, name, CommandStream(stream, end, colour=colour, answers=answers))
    return end


def _tell_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning without the line of source that warns."""
    print(f"shardplan: warning: {line(message)}", file=sys.stderr)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command, what stands after `shardplan`, and return its exit status.

    An error is a line on stderr, and under `--json` an object on stdout. None of the arguments asks for help.
    """
    try:
        status = app(list(arguments) or ["--help"], prog_name="shardplan", standalone_mode=False)
        sys.stdout.flush()
        if status == INTERRUPTED:  # typer makes an exit of it
            raise KeyboardInterrupt
        return status if isinstance(status, int) else DONE
    except (BrokenPipeError, SystemExit) as left:
        if _COMPLETION in os.environ and isinstance(left, SystemExit):  # a shell asks for names, and reads the status
            return left.code if isinstance(left.code, int) else DONE
        # The reader left (where typer sees that first, it exits); what is buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE
    except (Infeasible, MemoryError, MissingExtra) as error:
        return complain(error, IMPOSSIBLE, arguments, default="not enough memory for what was asked")
    except (TimedOut, BackendError) as error:
        return complain(error, FAILED, arguments)
    except ShardplanError as error:
        return complain(error, MISTAKE, arguments)
    except _USAGE_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        return complain(str(message).replace("\n", " "), MISTAKE, arguments, "UsageError")
    except OSError as error:
        name = f"{line(error.filename)}: " if error.filename else ""
        return complain(f"{name}{error.strerror or error}", MISTAKE, arguments, "OSError")
    except (KeyboardInterrupt, typer.Abort):
        return complain("interrupted", INTERRUPTED, arguments, "Interrupted")


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """Plans, proves, predicts and runs how tensors are placed on, and moved across, a cluster of accelerators."""
    if version:
        from shardplan import __version__

        print(f"shardplan {__version__}")
        raise typer.Exit


def move() -> None:
    """Plan a move: of arrays from one sharding to another, or of a model's weights between frameworks' storage.

    Of types (`f32[64@data, 48]`) it is `redistribute`, of sides (`vllm,tp=8`) `refit`: their helps have the options.
    """
    raise ShardplanError("move: nothing is said to be moved; legal are two types, or two sides of weights")


for _command in (
    plan, audit, move, show, run, redistribute, refit, check, simulate, why, fuse, place, reduce, reshard, apply, diff,
    derive, topologies, validate, calibrate, measure, bench,
):  # fmt: skip
    app.command(**command_help(_command.__name__))(_command)
app.command("convert", **command_help("convert"))(reshard)
app.add_typer(lab_commands.app, short_help=command_help("lab")["short_help"])
