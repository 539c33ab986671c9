"""The command line: finds the verbs, runs one, turns every ending into one line and an exit code.

Knows: where verbs live and how a failure is shown. Does not know: what any verb does.

A verb is a file `appliance/commands/<verb>.py` with a function of the file's name and a text `EXAMPLE`; other packages
add theirs as entry points of the group "appliance.commands" ("package.module:function"). A module with a table `COMMANDS`
has verbs of its own below that one, as in `appliance job run`. Names, summaries and examples
are read from the source text, so that help imports no verb; a verb is imported when it is run.
"""

import ast
import difflib
import errno
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import typer.core

from appliance import commands
from appliance.errors import ApplianceError, StorageError

GROUP = "appliance.commands"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# What a folder or a disk can be at fault for; anything else that the system refuses is a fault of the program.
PLACE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
    errno.ENAMETOOLONG, errno.EIO,
)  # fmt: skip
INTERRUPTED = 130
PIPE_CLOSED = 141  # as a shell reports the signal that usually ends such a writer


@dataclass(frozen=True)
class Verb:
    """One verb, as its source text describes it."""

    name: str
    module: str
    function: str
    summary: str
    example: str


def verbs() -> dict[str, Verb]:
    """Every verb whose module is there, sorted by name."""
    found = {name: (f"{commands.__name__}.{name}", name) for _, name, _ in pkgutil.iter_modules(commands.__path__)}
    for entry in importlib.metadata.entry_points(group=GROUP):
        found[entry.name] = (entry.module, entry.attr)
    read = (_describe(name, module, function) for name, (module, function) in sorted(found.items()))
    return {verb.name: verb for verb in read if verb is not None}


def _describe(name: str, module: str, function: str) -> Verb | None:
    """Read a verb's summary and example without importing it; None when its module or function is not there."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    summary = example = None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            summary = (ast.get_docstring(node) or "").split("\n", 1)[0]
        elif isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == "EXAMPLE" for to in node.targets):
            example = ast.literal_eval(node.value)
    return None if summary is None else Verb(name, module, function, summary, example or f"appliance {name}")


class Verbs(typer.core.TyperGroup):
    """The group of all verbs; loads only the one that is run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(verbs())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        verb = verbs().get(cmd_name)
        return load(verb) if verb else None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The overview: each verb with its summary and an example."""
        formatter.write("Usage: appliance [--debug] VERB [OPTIONS] [ARGUMENTS]\n\n")
        formatter.write("A private AI host for this machine: get a model, build it for this hardware, serve it, talk to it.\n")
        listed = verbs().values()
        width = max(len(verb.name) for verb in listed) + 2
        for verb in listed:
            formatter.write(f"\n  {verb.name:<{width}}{verb.summary}\n  {'':<{width}}$ {verb.example}\n")
        formatter.write("\nEvery verb explains its options: appliance VERB --help\n")
        formatter.write("Options: --debug (show the trace of a failure), --version, --help\n")


def load(verb: Verb) -> Any:
    """Import a verb and make the command of it."""
    module = importlib.import_module(verb.module)
    function: Callable[..., int | None] = getattr(module, verb.function)
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    # \b keeps the lines of the example as they are.
    epilog = f"\b\nExample:\n  {verb.example}"
    inner: dict[str, Callable[..., int | None]] = getattr(module, "COMMANDS", {})
    if inner:
        app.callback(epilog=epilog)(function)  # no command: one line, as any other mistake; help is asked for
        for name, one in inner.items():
            app.command(name)(one)
    else:
        app.command(verb.name, epilog=epilog, no_args_is_help=False)(function)
    return typer.main.get_command(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"appliance {importlib.metadata.version('appliance')}")
        raise typer.Exit


def command() -> Any:
    """The whole command line as one command object."""
    app = typer.Typer(cls=Verbs, rich_markup_mode=None, add_completion=False)

    @app.callback()
    def options(
        debug: bool = typer.Option(False, "--debug", help="Show the trace of a failure."),
        version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
    ) -> None:
        """Options of every verb."""

    return typer.main.get_command(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code, never raises.

    0 done; 1 failed; 2 bad input; 3 not now; 5 device; 130 interrupted (see `appliance.errors`).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments[:1]
    # onnxruntime's Linux wheels gather usage data in ~/.cache and send it; read once, when the library is loaded.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    _open_missing_streams()
    try:
        result = command().main(args=arguments if arguments[debug:] else ["--help"], prog_name="appliance", standalone_mode=False)
        sys.stdout.flush()
        if result == INTERRUPTED:  # how the parser hands on Ctrl-C
            return _fail("interrupted", INTERRUPTED)
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except (BrokenPipeError, SystemExit) as ending:
        # The reader of a pipe went away ("appliance models | head"): that is no failure worth a word. The parser, where
        # it sees that first, exits by itself.
        if not isinstance(ending, BrokenPipeError) and not isinstance(ending.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return PIPE_CLOSED
    except Exception as failure:
        if debug:
            traceback.print_exc()
        return _fail(*_explain(failure, arguments))


def _open_missing_streams() -> None:
    """Put /dev/null where the caller closed a standard stream.

    Python has None there, which no verb expects; and the next file opened would get its number, so that a stray print went
    into that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  (for the whole run)


def _explain(failure: Exception, arguments: Sequence[str]) -> tuple[str, int]:
    """The one line and the exit code of a failure."""
    if isinstance(failure, ApplianceError):
        return str(failure), failure.exit_code
    # A mistake in the command line itself: any of the argument parser's errors, which typer names only by the leaf.
    parser_error = typer.BadParameter.__mro__[2]
    if isinstance(failure, parser_error):
        message = str(getattr(failure, "format_message", failure.__str__)()).rstrip(".")
        path = getattr(getattr(failure, "ctx", None), "command_path", "appliance")
        return f"{message[:1].lower()}{message[1:]}; {_nearest(message)}see: {path} --help", 2
    if isinstance(failure, OSError) and failure.errno in FULL_DISK:
        return f"cannot write {failure.filename or 'to the disk'}: {failure.strerror}; free some space", StorageError.exit_code
    if isinstance(failure, OSError) and failure.errno in PLACE and failure.filename is not None:
        return f"cannot use {failure.filename}: {failure.strerror}; check the folder and its permissions", StorageError.exit_code
    again = shlex.join(["appliance", "--debug", *arguments])
    reason = " ".join(str(failure).split()) or "no reason given"
    return f"unexpected {type(failure).__name__}: {reason}; this is a fault of the program, its trace: {again}", 1


def _nearest(message: str) -> str:
    """The verb that was meant, where `message` complains of one that there is not."""
    found = re.fullmatch(r"No such command '(.+)'", message)
    near = difflib.get_close_matches(found[1], [*verbs()], n=1) if found else []
    return f"did you mean {near[0]}? " if near else ""


def _fail(line: str, code: int) -> int:
    sys.stdout.flush()
    print(f"appliance: {' '.join(line.split())}", file=sys.stderr)
    return code
