"""What stands in the repository besides code: generated pages are current, README's commands exist, nothing private."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from appliance.cli import verbs

ROOT = Path(__file__).resolve().parents[2]
# Folders of one machine, at the start of a path, and hosts of package registries. Written in pieces, so that this file
# does not hold what it looks for.
FOLDERS = ("tm" + "p", "wo" + "rk", "ro" + "ot")
HOSTS = ("pypi" + ".org", "python" + "hosted", "npmjs" + ".org", "debian" + ".org")
PRIVATE = re.compile(rf"(?<![\w.\-~}}/*)])/(?:{'|'.join(FOLDERS)})/|{'|'.join(map(re.escape, HOSTS))}".encode())


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_page_of_commands_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.PAGE.read_text(encoding="utf-8") == generate.page(), "run: make docs"


def test_the_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL)) + "\n".join(re.findall(r"`([^`\n]+)`", text))
    blocks = re.sub(r"#.*", "", blocks)
    wanted = set(re.findall(r"\bappliance ([a-z]+)\b", blocks))
    assert wanted, "the README names no command"
    assert wanted <= set(verbs()), wanted - set(verbs())
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", blocks)) <= targets


def test_ci_runs_what_the_readme_says() -> None:
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith("exec make test")
    assert "\nmake test\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_links_of_the_documents_lead_somewhere() -> None:
    for page in [path for path in tracked() if path.suffix == ".md"]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"


def test_the_pages_that_messages_and_comments_point_to_exist() -> None:
    for path in tracked():
        if path.suffix in (".py", ".toml", ".service") and "tests" not in path.parts:
            text = path.read_text(encoding="utf-8")
            for page in re.findall(r"(?<![\w/'])docs/[a-z-]+\.md(?! \(github)", text):
                assert (ROOT / page).is_file(), f"{path.relative_to(ROOT)} names {page}"


def test_no_tracked_file_names_a_private_place() -> None:
    guilty = {str(path.relative_to(ROOT)): found[0] for path in tracked() if (found := PRIVATE.search(path.read_bytes()))}
    assert not guilty, guilty


def test_the_search_for_private_places_finds_them() -> None:
    for text in (f"open('/{FOLDERS[0]}/x')", f"/{FOLDERS[1]}/main", f" https://{HOSTS[0]}/simple"):
        assert PRIVATE.search(text.encode()), text
    for text in (f"<name>.partial/{FOLDERS[1]}/", f"{{data}}/{FOLDERS[0]}/x"):
        assert not PRIVATE.search(text.encode()), text


def test_lock_files_pin_and_hash_everything() -> None:
    for name in ("requirements.lock", "requirements-test.lock", "requirements-full.lock"):
        text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            assert re.match(r"^[a-z0-9.-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line), f"{name}: {line[:80]}"


def test_the_lock_files_agree() -> None:
    names = ("requirements.lock", "requirements-test.lock", "requirements-full.lock")
    small, middle, large = (versions((ROOT / name).read_text(encoding="utf-8")) for name in names)
    assert small <= middle <= large, (small - middle) | (middle - large)


# What each lock file must hold, as the Makefile's `lock` asks for it.
LOCKED = {
    "requirements.lock": ("link",),
    "requirements-test.lock": ("link", "test", "openvino"),
    "requirements-full.lock": ("link", "test", "openvino", "peers"),
}


@pytest.mark.parametrize("name", LOCKED)
def test_a_lock_file_holds_everything_the_project_asks_for(name: str) -> None:
    """A dependency that is declared and not locked works where it was added, and nowhere else: not in `make demo`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in LOCKED[name]:
        wanted += project["optional-dependencies"][extra]
    locked = dict(pin.split("==") for pin in versions((ROOT / name).read_text(encoding="utf-8")))
    for requirement in map(Requirement, wanted):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in {name}; run: make lock"
        assert requirement.specifier.contains(version), f"{requirement} is not met by {version} of {name}; run: make lock"


def test_every_module_that_the_program_imports_is_locked() -> None:
    locked = {pin.split("==")[0] for pin in versions((ROOT / "requirements.lock").read_text(encoding="utf-8"))}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    locked |= {canonicalize_name(Requirement(one).name) for one in extras["openvino"] + extras["gguf"]}  # asked for, not given
    owners = packages_distributions()
    own = {"appliance", "export", "quant", "tui", "demo"}
    missing = {}
    for path in tracked():
        if path.suffix != ".py" or path.relative_to(ROOT).parts[0] not in own:
            continue
        for module in imported(path.read_text(encoding="utf-8")) - own - sys.stdlib_module_names:
            if not {canonicalize_name(name) for name in owners.get(module, [])} & locked:
                missing[module] = str(path.relative_to(ROOT))
    assert not missing, f"declare these in pyproject.toml, then run: make lock: {missing}"


def imported(text: str) -> set[str]:
    """The top modules that a program imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def versions(text: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9.-]+==[^ \\;]+)", text, re.MULTILINE))


def test_the_page_of_routes_lists_every_one() -> None:
    """Every route of the daemon, and none that it has not."""
    served = {
        (method, path.replace("{model:path}", "{model}"))
        for file in (ROOT / "appliance" / "api").glob("*.py")
        for method, path in routes_of(file.read_text(encoding="utf-8"))
    }
    rows = re.findall(r"^\| `([A-Z, ]+) (/\S+)` \|", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = {(method, path) for methods, path in rows for method in methods.split(", ")}
    assert served == listed, served ^ listed


def routes_of(text: str) -> list[tuple[str, str]]:
    """Methods and paths of a module's `@router.method(path)`, its constants and its router's prefix put in."""
    constants: dict[str, str] = {}
    for name, value in re.findall(r'^([A-Z]+) = f?"([^"]+)"', text, re.MULTILINE):
        constants[name] = re.sub(r"\{([A-Z]+)\}", lambda found: constants[found[1]], value).replace("{{", "{").replace("}}", "}")
    prefix = "".join(re.findall(r'APIRouter\(prefix="([^"]+)"', text))
    found = []
    for method, written in re.findall(r"@router\.([a-z]+)\(([^,)]+)", text):
        path = written.strip('f"') if '"' in written else constants[written]
        found.append((method.upper(), prefix + re.sub(r"\{([A-Z]+)\}", lambda name: constants[name[1]], path)))
    return found
