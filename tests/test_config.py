"""Settings: defaults, where the file is found, and what a wrong one says."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import config as config_module
from appliance.config import Address, Config, load_config, parse_address
from appliance.errors import ConfigError


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: the path of a Unix socket in it may have 107 bytes, and those of pytest's workers take most of them."""
    with tempfile.TemporaryDirectory(prefix="s") as folder:
        yield Path(folder)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment whose folders all lie in an empty one, on a machine without a system file."""
    monkeypatch.setattr(config_module, "SYSTEM_FILE", tmp_path / "etc" / "appliance.toml")
    return {"HOME": str(tmp_path)}


def load(text: str, folder: Path) -> Config:
    path = folder / "appliance.toml"
    path.write_text(text)
    return load_config(path, {"HOME": str(folder)})


def test_defaults_follow_xdg(nowhere: dict[str, str], tmp_path: Path) -> None:
    config = load_config(None, nowhere)
    assert config.paths.models == tmp_path / ".local/share/appliance/models"
    assert config.paths.cache == tmp_path / ".cache/appliance"
    assert config.paths.state == tmp_path / ".local/state/appliance"
    assert config.paths.runtime == tmp_path / ".local/state/appliance/run"
    assert config.paths.targets == tmp_path / ".config/appliance/targets.d"
    assert config.server.addresses == (Address("127.0.0.1", 8420),)
    moved = {
        "XDG_DATA_HOME": "/d", "XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/r", "XDG_CONFIG_HOME": "/k"
    }  # fmt: skip
    paths = load_config(None, {**nowhere, **moved}).paths
    assert [str(paths.models), str(paths.cache), str(paths.state)] == ["/d/appliance/models", "/c/appliance", "/s/appliance"]
    assert [str(paths.runtime), str(paths.targets)] == ["/r/appliance", "/k/appliance/targets.d"]


def test_a_relative_xdg_folder_is_ignored(nowhere: dict[str, str], tmp_path: Path) -> None:
    paths = load_config(None, {**nowhere, "XDG_DATA_HOME": "data", "XDG_RUNTIME_DIR": "run"}).paths
    assert paths.models == tmp_path / ".local/share/appliance/models"
    assert paths.runtime == tmp_path / ".local/state/appliance/run"


def test_the_first_file_found_wins(nowhere: dict[str, str], tmp_path: Path) -> None:
    def write(path: Path, threads: int) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"[engine]\nthreads = {threads}\n")
        return path

    write(tmp_path / "etc" / "appliance.toml", 1)
    assert load_config(None, nowhere).engine.threads == 1
    write(tmp_path / ".config/appliance/appliance.toml", 2)
    assert load_config(None, nowhere).engine.threads == 2
    named = {**nowhere, "APPLIANCE_CONFIG": str(write(tmp_path / "named.toml", 3))}
    assert load_config(None, named).engine.threads == 3
    assert load_config(write(tmp_path / "argument.toml", 4), named).engine.threads == 4


def test_a_file_named_but_missing_is_an_error(nowhere: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml, named by APPLIANCE_CONFIG, does not exist"):
        load_config(None, {**nowhere, "APPLIANCE_CONFIG": str(tmp_path / "gone.toml")})
    with pytest.raises(ConfigError, match=r"gone\.toml, named on the command line, does not exist"):
        load_config(tmp_path / "gone.toml", nowhere)
    with pytest.raises(ConfigError, match=r", named by APPLIANCE_CONFIG, is no file"):
        load_config(None, {**nowhere, "APPLIANCE_CONFIG": str(tmp_path)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nlissten = []\n", r'unknown key "server\.lissten"; did you mean "listen"\?'),
        ("threads = 2\n", 'unknown key "threads"'),
        ("[engine]\nthreads = -1\n", r'"engine\.threads": input should be greater than or equal to 0'),
        ("[engine]\nthreads = 1.5\n", r'"engine\.threads"'),
        ('[log]\nlevel = "loud"\n', r'"log\.level": input should be \'debug\''),
        ('[server]\nlisten = ["8420"]\n', '"8420" is no address'),
        ('[paths]\nmodels = "bundles"\n', "bundles is a relative path"),
        ("paths = 3\n", '"paths"'),
        ("[server\n", "not valid TOML"),
    ],
)
def test_a_wrong_file_says_what_and_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(text, tmp_path)
    assert str(tmp_path / "appliance.toml") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_key_can_be_set(tmp_path: Path) -> None:
    config = load(
        '[paths]\nmodels = "~/m"\n[server]\nlisten = ["[::1]:0", "localhost:9"]\nsocket = false\n'
        '[models]\ndefault = "a/b"\npreload = false\naliases = {x = "a/b"}\n[engine]\ntarget = "openvino"\n'
        '[log]\nlevel = "debug"\nformat = "json"\n',
        tmp_path,
    )
    assert config.paths.models == Path.home() / "m"
    assert config.server.addresses == (Address("::1", 0), Address("localhost", 9))
    assert config.models.aliases == {"x": "a/b"}
    assert config.log.format == "json"


def test_it_is_frozen_and_documented(tmp_path: Path) -> None:
    config = load("", tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        config.engine.threads = 3  # type: ignore[misc]
    sections = [type(getattr(config, name)) for name in Config.model_fields]
    undocumented = [
        f"{section.__name__}.{name}"
        for section in sections
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert not undocumented
    assert all(section.__doc__ for section in sections)


def test_a_socket_path_that_cannot_be_bound_is_refused_early(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="over 107 bytes"):
        load(f'[paths]\nruntime = "/{"x" * 100}"\n', tmp_path)
    load(f'[paths]\nruntime = "/{"x" * 100}"\n[server]\nsocket = false\n', tmp_path)


@pytest.mark.parametrize("text", ["", "8420", ":8420", "host:", "host:x", "host:65536", "::1:80", "[::1]", "[host]:80", "host:²"])
def test_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [("127.0.0.1:1", True), ("127.9.9.9:1", True), ("[::1]:1", True), ("localhost:1", True), ("0.0.0.0:1", False),
     ("192.168.1.2:1", False), ("[::]:1", False), ("box.lan:1", False), ("127.0.0.1.nip.io:1", False)],
)  # fmt: skip
def test_loopback(text: str, loopback: bool) -> None:
    assert parse_address(text).loopback is loopback
    assert str(parse_address(text)) == text
