"""The sample documents: each can be read, cited and made again."""

from pathlib import Path

import pytest

from appliance.jobs.catalog import JobFolder
from appliance.knowledge.reading import read_document
from tests.demo.make_samples import SAMPLES, make

JOBS = SAMPLES.parent / "jobs"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    make(folder)
    return folder


def test_the_folder_holds_every_kind_and_a_foreign_name() -> None:
    files = sorted(SAMPLES.iterdir())
    assert {path.suffix for path in files} == {".md", ".html", ".docx", ".pdf"}
    assert [path.name for path in files if not path.name.isascii()] == ["café-inventory-november.md"]
    assert max(path.stat().st_size for path in files) < 100_000


@pytest.mark.parametrize("path", sorted(SAMPLES.iterdir()), ids=lambda path: path.name)
def test_every_sample_can_be_read_and_cited(path: Path) -> None:
    document = read_document(path)
    assert len(document.text.split()) > 50
    anchors = [section.anchor for section in document.sections]
    assert all(document.at(anchor) for anchor in anchors)
    assert anchors == ["page 1", "page 2", "page 3"] if path.name == "deck-oven-manual.pdf" else anchors


def test_the_made_ones_are_those_that_are_committed(made: Path) -> None:
    assert len(list(made.iterdir())) == 3
    for path in made.iterdir():
        assert read_document(path).text == read_document(SAMPLES / path.name).text


def test_the_job_may_do_what_it_needs() -> None:
    found = JobFolder(JOBS, Path("/reports")).read_all()
    assert found.problems == () and list(found.jobs) == ["nightly-digest"]
    job = found.jobs["nightly-digest"]
    assert job.warnings == ()
    assert job.grants.folders == (SAMPLES,)
    assert job.file.schedule is not None
    assert job.file.schedule.deadline_minutes >= 24 * 60, "its last due time must never be too long ago"
