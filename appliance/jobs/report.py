"""The report: the draft as Markdown, and the state that it stands for.

Knows: what a reader must be told. Does not know: files, ledgers, models.
The same draft gives the same text, byte for byte: nothing in it comes from the clock.
"""

from dataclasses import dataclass
from pathlib import Path

from appliance.jobs.citations import normalize
from appliance.jobs.draft import Claim, Draft, Section
from appliance.jobs.record import Record


@dataclass(frozen=True)
class Verdict:
    """How a run ends."""

    state: str  # "done" or "failed"
    reason: str  # why it failed, or what a reader of the ledger should know all the same


def judge(draft: Draft) -> Verdict:
    """Done only when the check was made and everything held."""
    reasons = list(draft.failures)
    claims = draft.claims
    wrong = sum(claim.problem is not None for claim in claims)
    if wrong:
        reasons.append(f"{wrong} of {len(claims)} citations unverified")
    if claims and not draft.checked:
        reasons.append("the citations were not checked")
    if draft.unread and not draft.ready:
        reasons.append("no document could be read")
    if not reasons and not claims and not draft.text.strip():
        reasons.append("there is nothing to report")
    warnings = ["nothing ties the answer to a source"] if draft.text.strip() and not claims else []
    warnings += [f"not read: {Path(one.path).name} ({one.reason})" for one in draft.unread]
    warnings += [f"{'denied' if one.denied else 'failed'}: {one.tool} ({one.reason})" for one in draft.refusals]
    return Verdict("failed" if reasons else "done", "; ".join([*reasons, *warnings]))


def render(title: str, run: str, draft: Draft, record: Record, verdict: Verdict) -> str:
    """The whole report."""
    parts = [f"# {normalize(title)}", _head(run, draft, record, verdict)]
    parts += [_section(section) for section in draft.sections]
    if draft.text.strip():
        heading = "Said without a source" if draft.claims else "Answer"
        parts.append(f"## {heading}\n\n{draft.text.strip()}")
    if draft.unread:
        lines = [f"- `{document.path}`: {document.reason}" for document in draft.unread]
        parts.append("## Not read\n\n" + "\n".join(lines))
    if draft.refusals:
        lines = [f"- `{one.tool}`, {'denied' if one.denied else 'failed'}: {one.reason}" for one in draft.refusals]
        parts.append("## Tool calls that were refused\n\n" + "\n".join(lines))
    if draft.ready:
        lines = [f"- `{document.path}`, sha256 {document.sha256[:16]}" for document in draft.ready]
        parts.append("## Documents\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _head(run: str, draft: Draft, record: Record, verdict: Verdict) -> str:
    claims = draft.claims
    verified = sum(claim.problem is None for claim in claims) if draft.checked else 0
    dropped = sum(section.dropped for section in draft.sections)
    models = sorted({f"{one.model} on {one.provider}" for one in record.results if one.model})
    rows = [
        ("State", f"**{verdict.state}**" + (f": {normalize(verdict.reason)}" if verdict.reason else "")),
        ("Run", f"`{run}`"),
        ("Citations", f"{verified} of {len(claims)} verified against the source"),
        ("Documents", f"{len(draft.ready)} read, {len(draft.unread)} not read"),
        ("Left out", f"{dropped} sentences of the model that no passage supports"),
        ("Model", ", ".join(models) or "none"),
        ("Cost", f"{record.tokens} tokens, {record.seconds:.1f} s, {record.counted} calls"),
    ]
    # A bar would end the table's cell.
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {text.replace('|', '/')} |" for name, text in rows)


def _section(section: Section) -> str:
    lines = [_claim(claim, section) for claim in section.claims]
    body = "\n".join(lines) or "Nothing that was said here could be tied to a source."
    note = f"*{section.note}*\n\n" if section.note else ""
    return f"## {normalize(section.title)}\n\n{note}{body}"


def _claim(claim: Claim, section: Section) -> str:
    mark = f" **[unverified: {claim.problem}]**" if claim.problem is not None else ""
    file = "" if section.path == claim.path else f"{Path(claim.path).name}, "
    return f"- {normalize(claim.sentence)}{mark}\n  > “{normalize(claim.quote)}” ({file}{claim.anchor})"
