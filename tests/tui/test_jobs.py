"""The jobs' screens against a real daemon whose jobs are made up."""

import httpx
import pytest

from tests.tui.fake_jobs import RUN, FakeJobs
from tests.tui.terminal import Box, draft, make_app, see, seen, until, write
from tui.client import Client

pytestmark = pytest.mark.anyio
SIZE = (140, 40)


async def test_jobs_ledger_run_report_and_a_call(box: Box) -> None:
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("ctrl+t")
        await see(pilot, "30 2 * * * Europe/Berlin", "12-01 01:30Z", "✓ done 11-30 01:30Z", "when asked")
        await see(
            pilot, "mail2.toml: unknown key", "! missed", "the appliance was off", "✗ failed", "1 of 3 citations unverified"
        )
        await see(pilot, "41.6 s", "2012")  # 1800 + 212 tokens
        await pilot.press("tab", "enter")
        await see(pilot, RUN, "done · 41.6 s · 2012 tokens · fake/model · FakeExecutionProvider", "report: reports/night.md")
        await see(pilot, "01:30:00", "1.search", "denied", "read_file is not granted", "30.20 s", "1012")
        await pilot.press("down", "down", "enter")
        await see(pilot, "3.agent.read: tool, denied", '"path": "secret.txt"')
        await pilot.press("escape", "p")
        await see(pilot, "Night report", "The valve is turned to the left.")
        assert "1.search" not in seen(app)
        await pilot.press("escape", "escape")
        await see(pilot, "Ask something")


async def test_run_now_and_see_it_end(box: Box) -> None:
    jobs = box.jobs
    assert isinstance(jobs, FakeJobs)
    app = make_app(box.url)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("ctrl+t")
        await see(pilot, "night")
        await pilot.press("down", "r")
        await see(pilot, "night@2026-11-30T09:00Z is queued", "· queued")
        assert jobs.posted == ["night"]
        await pilot.press("r")
        await see(pilot, "was asked for already")
        jobs.finish()  # by itself, without a key
        await see(pilot, "✓ done 11-30 09:00Z", "2.5 s")
        await pilot.press("enter")
        await see(pilot, "night@2026-11-30T09:00Z  done")
        await pilot.press("p")
        await see(pilot, "There is no report yet.")


@pytest.mark.parametrize("keys", [("ctrl+r",), ("r",), ("enter",)], ids=["refresh", "run", "open"])
async def test_the_daemon_goes_away_under_the_jobs(box: Box, keys: tuple[str, ...]) -> None:
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await write(pilot, "a draft", send=False)
        await pilot.press("ctrl+t")
        await see(pilot, "the appliance was off")
        box.stop()
        await pilot.press(*keys)
        await see(pilot, "has gone", "start it: appliance serve", "Ctrl+R tries again")
        box.start()
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "has gone" not in seen(app))
        await pilot.press("escape", *(["escape"] if keys == ("enter",) else []))
        await until(pilot, lambda: "Ask something" in seen(app) or "a draft" in seen(app))
        assert draft(app) == "a draft"


async def test_a_daemon_without_jobs_is_told_of(box: Box) -> None:
    box.stop()
    box.jobs = None
    box.start()
    async with make_app(box.url).run_test(size=(80, 24)) as pilot:
        await pilot.press("ctrl+t")
        await see(pilot, "this daemon does no jobs", "update the appliance")
        await pilot.press("r")
        await see(pilot, "this daemon does no jobs")


async def test_a_run_that_is_gone_is_told_of(box: Box) -> None:
    jobs = box.jobs
    assert isinstance(jobs, FakeJobs)
    async with make_app(box.url).run_test(size=(80, 24)) as pilot:
        await pilot.press("ctrl+t")
        await see(pilot, "night")
        jobs.entries.clear()
        await pilot.press("tab", "enter")
        await see(pilot, "there is no run", "appliance job ledger", "Esc goes back")


async def test_names_are_quoted_in_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path.decode())
        return httpx.Response(404, json={"error": {"message": "no", "code": "not_found"}})

    client = Client(())
    client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://x")
    for call in (client.run("a b/c@2026-11-30T01:30Z"), client.start_run("ä?x")):
        with pytest.raises(Exception, match="no"):
            await call
    await client.close()
    assert asked == ["/appliance/v1/runs/a%20b%2Fc%402026-11-30T01%3A30Z", "/appliance/v1/jobs/%C3%A4%3Fx/runs"]
