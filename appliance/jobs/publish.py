"""From the draft to files: the report, and the run's own folder.

    runs/JOB@SLOT/report.md   a copy of the report
                  inputs.json the documents with their hashes
                  trace.json  every recorded call

Knows: which files a run leaves. Does not know: how they look.
"""

import json

from appliance.errors import ConfigError
from appliance.jobs.files import run_stem, write_text
from appliance.jobs.record import Outcome
from appliance.jobs.report import Verdict, judge, render
from appliance.jobs.steps import check
from appliance.jobs.work import Work


def publish(work: Work, name: str) -> Verdict:
    """Check what is unchecked, write the report unless it stands there already, and say how it ends."""
    if not work.draft.checked:
        check.run(work, check.Settings(kind="check"), f"{name}.check")
    verdict = judge(work.draft)
    text = render(work.job.output.title or work.job.name, work.run, work.draft, work.record, verdict)
    if text == work.draft.published:
        return verdict
    path = work.grants.output / f"{run_stem(work.job.name, work.slot)}.md"
    result = work.record.call(name, "code", {"path": str(path), "state": verdict.state}, lambda: Outcome(_write(work, text)))
    if result.error is not None:
        raise ConfigError(result.error)
    work.draft.published = text
    return verdict


def _write(work: Work, text: str) -> str:
    documents = [document.model_dump() for document in work.draft.documents]
    calls = [result.model_dump(mode="json") for result in work.record.results]
    write_text(work.folder / "report.md", text)
    write_text(work.folder / "inputs.json", json.dumps(documents, indent=1, ensure_ascii=False))
    write_text(work.folder / "trace.json", json.dumps(calls, indent=1, ensure_ascii=False))
    return str(write_text(work.grants.output / f"{run_stem(work.job.name, work.slot)}.md", text))
