"""House rules that a machine can keep: who may import whom, how long files and functions are, what names say nothing."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("appliance", "export", "quant", "tui")

# What each package may import of ours; the longest prefix of a module's name decides. The leaves everyone but tui may use.
LEAVES = {"appliance.errors", "appliance.strict", "appliance.paths"}
MAY_IMPORT: dict[str, set[str]] = {
    "appliance.errors": set(),
    "appliance.strict": set(),
    "appliance.paths": set(),
    "appliance.targets": {"appliance.targets"},
    "appliance.bundle": {"appliance.bundle"},
    "appliance.report": {"appliance.report", "appliance.bundle"},
    "appliance.runtime": {"appliance.runtime", "appliance.bundle", "appliance.targets"},
    "appliance.engine": {"appliance.engine", "appliance.runtime", "appliance.bundle", "appliance.targets"},
    "appliance.store": {"appliance.store"},
    "appliance.knowledge": {"appliance.knowledge", "appliance.store"},
    "appliance.tools": {"appliance.tools", "appliance.knowledge", "appliance.store"},
    "appliance.jobs": {"appliance.jobs", "appliance.tools", "appliance.knowledge", "appliance.store"},
    "appliance.api": {
        "appliance.api",
        "appliance.jobs",
        "appliance.knowledge",
        "appliance.engine",
        "appliance.store",
        "appliance.bundle",
    },
    "appliance": {"appliance"},  # config, daemon, cli and its commands compose
    "export.parity": {"export", "appliance.bundle", "appliance.targets", "appliance.runtime"},
    "export.build": {"export", "quant", "appliance.bundle", "appliance.targets"},
    "export.stages": {"export", "quant", "appliance.bundle", "appliance.targets"},
    "export.evaluation": {"export", "quant", "appliance.bundle", "appliance.targets"},
    "export.evaluate_command": {
        "export",
        "quant",
        "appliance.bundle",
        "appliance.commands.show",
        "appliance.config",
        "appliance.progress",
        "appliance.pull",
        "appliance.report",
        "appliance.targets",
    },
    "export.stages.evaluation": {
        "export",
        "quant",
        "appliance.bundle",
        "appliance.targets",
        "appliance.runtime",
        "appliance.report",
    },
    "export.command": {
        "export",
        "quant",
        "appliance.bundle",
        "appliance.targets",
        "appliance.config",
        "appliance.pull",
        "appliance.progress",
        "appliance.report",
    },
    "export": {"export", "appliance.bundle", "appliance.targets"},
    "quant.command": {"quant", "appliance.bundle", "appliance.targets", "appliance.config", "appliance.progress"},
    "quant": {"quant", "appliance.bundle", "appliance.targets", "appliance.runtime"},
    "tui": {"tui"},
}
# Leaves of meaning that exporters must share with composers without importing them.
NEVER = {"export": {"quant"}, "quant": {"export"}}


def sources() -> list[Path]:
    return [path for package in OURS for path in sorted((ROOT / package).rglob("*.py"))]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module) -> list[tuple[str, int]]:
    """Every import in the file, inside functions too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return [(name, line) for name, line in found if name.split(".")[0] in OURS]


def allowed(module: str, imported: str) -> bool:
    rule = max((name for name in MAY_IMPORT if module == name or module.startswith(name + ".")), key=len)
    permitted = MAY_IMPORT[rule] | (set() if rule == "tui" else LEAVES)
    return any(imported == name or imported.startswith(name + ".") for name in permitted)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_flow_one_way(path: Path) -> None:
    module = module_of(path)
    wrong = [f"line {line}: {name}" for name, line in imports_of(ast.parse(path.read_text())) if not allowed(module, name)]
    assert not wrong, f"{module} must not import {wrong}"


def test_the_import_check_sees_a_late_import() -> None:
    tree = ast.parse("def f():\n    from export.build import build\n")
    assert [name for name, _ in imports_of(tree) if not allowed("appliance.cli", name)] == ["export.build.build"]


def test_files_and_functions_are_small() -> None:
    long_files, long_functions = [], []
    for path in [*sources(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "bench").rglob("*.py"))]:
        text = path.read_text()
        if len(text.splitlines()) > 600:
            long_files.append(str(path.relative_to(ROOT)))
        long_functions += [
            f"{path.relative_to(ROOT)}:{node.name}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 100
        ]
    assert not long_files, f"over 600 lines: {long_files}"
    assert not long_functions, f"over 100 lines: {long_functions}"


def test_names_say_what_is_inside() -> None:
    empty = {"util", "utils", "helper", "helpers", "common", "misc", "manager"}
    assert not [str(path) for path in sources() if path.stem in empty]
