"""The command line: verbs are found, endings become one line and an exit code, help is fast and complete."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance import cli, errors


@pytest.fixture
def verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Adds a verb `act` with the given body to those that are there, as one more file of the folder."""

    def add(body: str) -> None:
        lines = [f"    {line}" for line in body.splitlines()]
        (tmp_path / "act.py").write_text(
            'EXAMPLE = "appliance act 7"\n\n\ndef act(number: int = 1):\n    """Do it."""\n' + "\n".join(lines)
        )
        monkeypatch.setattr("appliance.commands.__path__", [*cli.commands.__path__, str(tmp_path)])
        sys.modules.pop("appliance.commands.act", None)

    return add


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def test_a_file_in_the_folder_is_a_verb(verb: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    verb("print('number', number)\nreturn 7")
    assert cli.verbs()["act"].summary == "Do it."
    assert cli.main(["act", "--number", "5"]) == 7
    assert capsys.readouterr().out == "number 5\n"
    assert cli.main(["--help"]) == 0
    assert "$ appliance act 7" in capsys.readouterr().out


def test_every_verb_has_a_summary_and_an_example_of_itself() -> None:
    for verb in cli.verbs().values():
        assert verb.summary, verb.name
        assert verb.example.startswith(f"appliance {verb.name}"), verb.name


def test_the_overview_keeps_names_and_summaries_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for verb in cli.verbs().values():
        at = next(number for number, line in enumerate(lines) if line.split()[:1] == [verb.name])
        assert lines[at].split(None, 1) == [verb.name, verb.summary]
        assert lines[at + 1].strip() == f"$ {verb.example}"
        assert lines[at].index(verb.summary) == lines[at + 1].index("$")


def test_an_entry_point_whose_module_is_missing_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    points = [
        importlib.metadata.EntryPoint("gone", "export.no_such_module:gone", cli.GROUP),
        importlib.metadata.EntryPoint("elsewhere", "no_such_package.x:elsewhere", cli.GROUP),
        importlib.metadata.EntryPoint("nameless", "appliance.errors:nameless", cli.GROUP),
        importlib.metadata.EntryPoint("demo", "demo.run:main", cli.GROUP),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    names = set(cli.verbs())
    assert not names & {"gone", "elsewhere", "nameless"}
    assert "demo" in names


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        (
            "from appliance.errors import CheckpointError\nraise CheckpointError('x is no y', 'do z')",
            2,
            "appliance: x is no y; do z",
        ),
        ("from appliance.errors import StorageError\nraise StorageError('full\\nup')", 2, "appliance: full up"),
        ("raise KeyboardInterrupt", 130, "appliance: interrupted"),
        (
            "raise OSError(28, 'No space left on device', '/x')",
            2,
            "appliance: cannot write /x: No space left on device; free some space",
        ),
        ("raise ValueError('odd\\n  thing')", 1, "appliance: unexpected ValueError: odd thing; this is a fault of the program"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    verb: Callable[[str], None], capsys: pytest.CaptureFixture[str], body: str, code: int, line: str
) -> None:
    verb(body)
    assert cli.main(["act"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(lines_of(err)) == 1
    assert err.startswith(line)


def test_debug_shows_the_trace_that_the_line_promises(verb: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    verb("raise ValueError('odd')")
    cli.main(["act", "--number", "3"])
    line = capsys.readouterr().err
    assert "Traceback" not in line
    again = line.rsplit("its trace: appliance ", 1)[1].split()
    assert again == ["--debug", "act", "--number", "3"]
    assert cli.main(again) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fly"], "fly"),
        (["act", "--numbre", "3"], "--numbre"),
        (["act", "--number", "three"], "integer"),
        (["act", "--number"], "--number"),
        (["act", "surplus"], "surplus"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_mistyped_command_line_is_one_line_and_exit_code_2(
    verb: Callable[[str], None], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    verb("pass")
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(lines_of(err)) == 1
    assert said in err
    assert "--help" in err


def test_every_error_class_has_its_documented_exit_code() -> None:
    codes = {kind.__name__: kind.exit_code for kind in vars(errors).values() if isinstance(kind, type)}
    assert set(codes.values()) <= {1, 2, 3, 4, 5, 130}, codes


def test_help_imports_no_verb() -> None:
    heavy = ("onnxruntime", "onnx", "numpy", "pydantic", "fastapi", "httpx", "huggingface_hub", "appliance.commands.")
    check = "import sys; from appliance.cli import main; main(['--help']); "
    check += f"print([name for name in sys.modules if name.startswith({heavy!r})])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, *rest):
        if name == "appliance.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
runpy.run_module("appliance", run_name="__main__")
"""


def test_an_interruption_of_the_first_imports_leaves_no_trace() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_reader_that_goes_away_is_no_failure() -> None:
    """As in "appliance models | head": the other end of the pipe is closed before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    call = [sys.executable, "-m", "appliance", "--help"]
    done = subprocess.run(call, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", ["--help", "chat --local Hello"])
def test_a_closed_standard_stream_is_no_fault_of_the_program(closed: str, arguments: str, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    shell = f"exec {sys.executable} -m appliance {arguments} {closed}"
    done = subprocess.run(["sh", "-c", shell], env=environment, input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if arguments == "--help" else 2), done.stderr
    assert "Traceback" not in done.stderr and "unexpected" not in done.stderr, done.stderr
    assert len(lines_of(done.stderr)) <= 2, done.stderr


def test_a_place_that_cannot_be_used_is_told_as_one(verb: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever verb meets it first: the cache, the models, an output folder; a program's fault it is not."""
    for place in ("/proc/no/such", "/dev/null/below"):
        verb(f"import pathlib\npathlib.Path({place!r}).mkdir()")
        assert cli.main(["act"]) == errors.StorageError.exit_code
        line = capsys.readouterr().err
        assert line.startswith(f"appliance: cannot use {place}: ") and "check the folder" in line, line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["chatt"], "appliance: no such command 'chatt'; did you mean chat? see: appliance --help"),
        (["zzzz"], "appliance: no such command 'zzzz'; see: appliance --help"),
        (["job"], "appliance: missing command; see: appliance job --help"),
    ],
)
def test_a_verb_that_is_wrong_or_half_named_is_one_short_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr() == ("", f"{line}\n")


def test_debug_alone_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--debug"]) == 0
    assert capsys.readouterr().out.startswith("Usage: appliance")
