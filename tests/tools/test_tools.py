"""Tools: what they say of themselves, what they refuse, where they may go."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ApplianceError, NotFound, RequestError
from appliance.jobs.grants import Denied, confine
from appliance.tools import describe, known
from appliance.tools.calculator import calculator
from appliance.tools.desk import Desk


def desk(*folders: Path) -> Desk:
    def refuse(*_: Any) -> Any:
        raise AssertionError("not asked for")

    return Desk(lambda path: confine(path, folders), refuse, Path.read_text, refuse, refuse, folders)


def test_every_tool_is_described_by_its_signature_and_docstring() -> None:
    tools = known()
    assert set(tools) == {"knowledge_search", "read_file", "list_folder", "calculator", "write_report", "notify"}
    for tool in tools.values():
        assert tool.description and json.dumps(tool.schema())
        for field in tool.parameters["properties"].values():
            assert field["description"], tool.name
    search = tools["knowledge_search"].parameters
    assert search["required"] == ["query"] and search["properties"]["limit"]["maximum"] == 50
    assert search["additionalProperties"] is False


@pytest.mark.parametrize("arguments", [{}, {"expression": 3}, {"expression": "1", "more": 2}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="calculator: "):
        known()["calculator"].run(desk(), arguments)


def test_a_function_becomes_a_tool() -> None:
    def shout(desk: Desk, text: str, times: int = 2) -> str:
        """Say it loud.

        Args:
            text: what to say.
        """
        return text.upper() * times

    tool = describe(shout)
    assert tool.description == "Say it loud." and tool.run(desk(), {"text": "a"}) == "AA"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1+2*3", 7), ("(3 + 4) * 2.5", 17.5), ("-2**2", -4), ("sqrt(16) + abs(-1)", 5), ("7 // 2 % 2", 1), ("max(1, 2, 3)", 3)],
)
def test_arithmetic(expression: str, value: float) -> None:
    assert math.isclose(calculator(desk(), expression), value)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "().__class__", "open('x')", "a", "'a' * 9", "1 if 1 else 2", "[1][0]", "1/0",
        "9**9**9**9", "10**400", "(-1)**0.5", "1e999", "True", "sqrt(x=4)", "sqrt(-1)", "", "1+" * 200 + "1", "(" * 150, "round",
        "min()", "max(1)", "lambda: 1",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused_and_never_run(expression: str) -> None:
    with pytest.raises(RequestError):
        calculator(desk(), expression)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/a.txt").write_text("inside")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/secret.txt").write_text("outside")
    (tmp_path / "inside").mkdir()  # a neighbour whose name begins the same
    (tmp_path / "inside/b.txt").write_text("outside")
    os.symlink(tmp_path / "out/secret.txt", tmp_path / "in/link.txt")
    os.symlink(tmp_path / "out", tmp_path / "in/linked")
    os.symlink("a.txt", tmp_path / "in/fine.txt")
    return tmp_path


@pytest.mark.parametrize("path", ["a.txt", "sub/../a.txt", "fine.txt", "{tree}/in/a.txt", "{tree}/out/../in/a.txt"])
def test_paths_inside_are_read(tree: Path, path: str) -> None:
    assert known()["read_file"].run(desk(tree / "in"), {"path": path.format(tree=tree)}) == "inside"


@pytest.mark.parametrize(
    "path",
    [
        "../out/secret.txt",
        "link.txt",
        "linked/secret.txt",
        "sub/../../out/secret.txt",
        "/etc/passwd",
        "{tree}/inside/b.txt",
        "~/x",
    ],
)
def test_paths_that_lead_out_are_denied(tree: Path, path: str) -> None:
    with pytest.raises(Denied, match="in no granted folder"):
        known()["read_file"].run(desk(tree / "in"), {"path": path.format(tree=tree)})
    with pytest.raises(Denied):
        known()["list_folder"].run(desk(tree / "in"), {"path": path.format(tree=tree)})


def test_without_a_grant_every_path_is_denied(tree: Path) -> None:
    with pytest.raises(Denied):
        known()["read_file"].run(desk(), {"path": str(tree / "in/a.txt")})


def test_folders_are_listed(tree: Path) -> None:
    listed = known()["list_folder"]
    assert listed.run(desk(tree / "in"), {}) == [f"{tree}/in/"]
    assert listed.run(desk(tree / "in"), {"path": str(tree / "in")}) == ["a.txt", "fine.txt", "link.txt", "linked/", "sub/"]
    with pytest.raises(NotFound):
        listed.run(desk(tree / "in"), {"path": "none"})


def test_reading_is_cut_and_missing_files_are_named(tree: Path) -> None:
    assert known()["read_file"].run(desk(tree / "in"), {"path": "a.txt", "limit": 3}) == "ins"
    with pytest.raises(ApplianceError, match="there is no file none"):
        known()["read_file"].run(desk(tree / "in"), {"path": "none.txt"})
