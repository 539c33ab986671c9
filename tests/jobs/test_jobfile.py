"""Job files: what is wrong is named with its mend."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from appliance.errors import ApplianceError, ConfigError
from appliance.jobs.catalog import JobFolder
from appliance.jobs.service import describe_job

WHOLE = """
name = "digest"
[schedule]
cron = "30 2 * * *"
zone = "Europe/Berlin"
[grants]
tools = ["knowledge_search"]
folders = ["docs", "~/x", "/gone"]
[[step]]
kind = "search"
query = "x"
[[step]]
kind = "notify"
url = "http://127.0.0.1/x"
"""


def read(folder: Path, text: str, name: str = "digest.toml"):  # type: ignore[no-untyped-def]
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return JobFolder(folder, folder / "reports").read(path)


def test_a_whole_file_says_what_it_may_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "docs").mkdir()
    told = describe_job(read(tmp_path, WHOLE), datetime(2026, 3, 28, 12, tzinfo=UTC))
    # The night of 29 March has no 2:30 in Berlin.
    assert told["next_slots"] == ["2026-03-29T01:00Z", "2026-03-30T00:30Z", "2026-03-31T00:30Z"]
    assert told["grants"]["folders"] == [str(tmp_path / "docs"), str(tmp_path / "home/x"), "/gone"]
    assert told["grants"]["output"] == str(tmp_path / "reports/digest")
    assert told["warnings"] == [
        'step needs the tool "notify", which is not granted',
        f"the folder {tmp_path}/home/x is not there",
        "the folder /gone is not there",
    ]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "digest"', 'nmae = "digest"', 'unknown key "nmae"; did you mean "name"?'),
        ("[schedule]", "[schedul]", 'unknown key "schedul"; did you mean "schedule"?'),
        ("cron =", "corn =", 'unknown key "schedule.corn"; did you mean "cron"?'),
        ("30 2 * * *", "61 2 * * *", "'61' is no minute"),
        ("30 2 * * *", "30 25 * * *", "'25' is no hour"),
        ("30 2 * * *", "30 2 32 * *", "'32' is no day-of-month"),
        ("30 2 * * *", "30 2 * 13 *", "'13' is no month"),
        ("30 2 * * *", "30 2 * * 9", "'9' is no day-of-week"),
        ("30 2 * * *", "30 2 * *", '"schedule.cron": "30 2 * *" has 4 fields; five fields, e.g.'),
        ("30 2 * * *", "0 30 2 * * *", "has 6 fields"),
        ("30 2 * * *", "@daily", "has 1 fields"),
        ("Europe/Berlin", "Europe/Berlim", '"Europe/Berlim" is no time zone'),
        ("Europe/Berlin", "../../etc/passwd", "is no time zone"),
        ('"knowledge_search"', '"knowlege_search"', 'there is no tool "knowlege_search"; did you mean "knowledge_search"?'),
        ('kind = "search"', 'kind = "serach"', "unknown kind 'serach'; did you mean \"search\"?"),
        ('kind = "search"', "", "step 1: \"kind\": it is missing; kinds: agent"),
        ('query = "x"', 'qeury = "x"', 'step 1: unknown key "qeury"; did you mean "query"?'),
        ('query = "x"', 'query = ""', "step 1"),
        ('name = "digest"', 'name = "other"', 'the name inside is "other"; call the file other.toml'),
        ('name = "digest"', 'name = "Big Name"', "is no job name"),
        ('name = "digest"', 'name = "digest"\nprompt = "x"', 'either a "prompt" or [[step]] tables'),
        ('name = "digest"', 'name = "digest', "not valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_mend(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in WHOLE
    with pytest.raises(ConfigError) as failure:
        read(tmp_path, WHOLE.replace(old, new, 1))
    assert says in str(failure.value) and str(tmp_path / "digest.toml") in str(failure.value)


def test_a_job_needs_something_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='either a "prompt"'):
        read(tmp_path, 'name = "digest"')


def test_one_wrong_file_does_not_hide_the_others(tmp_path: Path) -> None:
    read(tmp_path, WHOLE)
    (tmp_path / "bad.toml").write_text("x = 1")
    (tmp_path / "notes.txt").write_text("no job")
    found = JobFolder(tmp_path, tmp_path).read_all()
    assert list(found.jobs) == ["digest"] and len(found.problems) == 1 and "bad.toml" in found.problems[0]
    assert JobFolder(tmp_path / "none", tmp_path).read_all().jobs == {}


def test_folders_that_lead_nowhere_do_not_hide_the_other_jobs(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    read(tmp_path, WHOLE.replace('"docs"', '"loop", "~nobody-of-this-name/x"'))
    (tmp_path / "nul.toml").write_text('name = "nul"\nprompt = "x"\n[grants]\nfolders = ["a\\u0000b"]')
    found = JobFolder(tmp_path, tmp_path / "reports").read_all()
    assert list(found.jobs) == ["digest"] and "is no path; leave out the NUL" in found.problems[0]
    assert f"the folder {tmp_path}/loop is not there" in found.jobs["digest"].warnings
    assert f"the folder {tmp_path}/~nobody-of-this-name/x is not there" in found.jobs["digest"].warnings


@pytest.mark.parametrize(
    ("name", "says"), [("digset", 'did you mean "digest"?'), ("../digest", "there is no job"), ("zzz", "put zzz.toml in")]
)
def test_a_job_that_is_not_there(tmp_path: Path, name: str, says: str) -> None:
    read(tmp_path, WHOLE)
    (tmp_path / "sub").mkdir()
    with pytest.raises(ApplianceError) as failure:
        JobFolder(tmp_path / "sub" if name.startswith(".") else tmp_path, tmp_path).find(name)
    assert says in str(failure.value)
