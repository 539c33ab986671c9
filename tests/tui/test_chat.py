"""The chat against a real daemon: what each key does, and what is left when the daemon goes away in the middle."""

import httpx
import pytest
from textual.widgets import OptionList

from tests.api.fake_engine import install_bundle, wait_until
from tests.test_daemon import daemon, settings
from tests.tui.terminal import Box, draft, make_app, see, seen, until, write
from tui.widgets.composer import Composer
from tui.widgets.conversations import ConversationList

pytestmark = pytest.mark.anyio
SIZE = (140, 40)


async def test_an_answer_comes_as_markdown_with_its_figures(box: Box) -> None:
    box.engine.pieces = ("# Title\n\n", "Some *text*", " and `code`.\n\n", "- one\n", "- two\n")
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await see(pilot, "fake/model", "FakeExecutionProvider", "context 0 (0%) of 100")
        await write(pilot, "hello there")
        # Four more pieces after the first, a twentieth of a second each; two words of prompt and five pieces of answer.
        await see(pilot, "▌ hello there", "Title", "Some text and code.", "• two", "20.0 tokens/s", "context 7 (7%) of 100")
        assert draft(app) == ""
    assert [message["content"] for message in box.engine.requests[0].prompt.messages] == ["hello there"]


async def test_the_conversation_goes_on_and_is_kept_by_the_daemon(box: Box) -> None:
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await write(pilot, "first question of mine")
        await see(pilot, "▌first question of mine", "context 8 (8%)")
        await write(pilot, "second")
        await until(pilot, lambda: seen(app).count("is Paris.") == 2)
        await until(pilot, lambda: len(kept(box)) == 4)
    said = [(message["role"], message["content"]) for message in box.engine.requests[1].prompt.messages]
    answer = "The capital of France is Paris."
    assert said == [("user", "first question of mine"), ("assistant", answer), ("user", "second")]
    messages = kept(box)
    assert [(one["role"], one["content"]) for one in messages] == [*said, ("assistant", answer)]
    figures = messages[1]
    assert (figures["provider"], figures["finish_reason"], figures["prompt_tokens"]) == ("FakeExecutionProvider", "stop", 4)
    assert figures["completion_tokens"] == 4 and figures["tokens_per_second"] == pytest.approx(20)

    async with make_app(box.url).run_test(size=SIZE) as pilot:  # another terminal, later
        await see(pilot, "first question of mine")
        await pilot.press("ctrl+l", "enter")
        await see(pilot, "▌ second", "context 15 (15%)")
        assert seen(pilot.app).count("is Paris.") == 2


async def test_stop_frees_the_model_and_keeps_what_came(box: Box) -> None:
    box.engine.pieces, box.engine.delay = ["word "] * 10_000, 0.01
    app = make_app(box.url)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await write(pilot, "go on for ever")
        await see(pilot, "word word word", "answering")
        await write(pilot, "meanwhile")  # stays where it is
        await see(pilot, "an answer is coming")
        assert draft(app) == "meanwhile"
        await pilot.press("escape")
        await see(pilot, "stopped", "context of 100")
        assert wait_until(lambda: box.engine.streams[0].cancelled.is_set() and box.engine.streams[0].over.is_set())
        await until(pilot, lambda: len(kept(box)) == 2)
        assert draft(app) == "meanwhile"
    assert kept(box)[1]["finish_reason"] == "stopped" and kept(box)[1]["content"].startswith("word word")


async def test_stop_before_the_first_word_gives_the_question_back(box: Box) -> None:
    box.engine.delay = 30
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await write(pilot, "a long prompt")
        await see(pilot, "waiting")
        await pilot.press("escape")
        await until(pilot, lambda: draft(app) == "a long prompt")
        assert "▌ a long prompt" not in seen(app)
    assert wait_until(lambda: box.engine.streams[0].cancelled.is_set())


async def test_a_refused_question_comes_back_with_the_reason(box: Box) -> None:
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await write(pilot, "word " * 200)
        await see(pilot, "the prompt has 200 tokens, the context holds 100; shorten it")
        assert draft(app).split() == ["word"] * 200
        await pilot.press("ctrl+n")
        app.screen.query_one(Composer).clear()
        await write(pilot, "short")
        await see(pilot, "is Paris.")
        assert "shorten it" not in seen(app)


async def test_a_model_that_fails_in_the_middle(box: Box) -> None:
    box.engine.fail_at = 2
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await write(pilot, "hello")
        await see(pilot, "The capital of France", "its log has the details")
        assert "secret" not in seen(app)


async def test_rename_and_delete(box: Box) -> None:
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await write(pilot, "one thing")
        await see(pilot, "▌one thing")
        await pilot.press("ctrl+n")
        await write(pilot, "another")
        await see(pilot, "▌another", " one thing")
        await pilot.press("ctrl+l", "down", "r")
        await see(pilot, "New title")
        await pilot.press("!", "enter")
        await see(pilot, "one thing!")
        await pilot.press("d")
        await see(pilot, "Delete “one thing!” for ever?")
        await pilot.press("n", "d")
        await see(pilot, "for ever?")
        await pilot.press("y")
        await until(pilot, lambda: "one thing" not in seen(app))
        assert "▌ another" in seen(app)  # the open one is another one
        await pilot.press("d", "y")
        await until(pilot, lambda: "another" not in seen(app))


async def test_the_model_can_be_chosen(box: Box, tmp_path: object) -> None:
    assert hasattr(tmp_path, "joinpath")
    install_bundle(tmp_path.joinpath("models"), "other")
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await see(pilot, "fake/model")
        await pilot.press("ctrl+o")
        await see(pilot, "Which model answers", "other", "w4a8 · 4096 tokens · unloaded")
        await pilot.press("down", "enter")
        await see(pilot, "other · model unloaded")
        await write(pilot, "hello")
        await see(pilot, "is Paris.", "other · FakeExecutionProvider")


async def test_a_fallback_is_told(box: Box) -> None:
    box.engine.fallbacks = ("2 nodes on the CPU",)
    async with make_app(box.url).run_test(size=SIZE) as pilot:
        await see(pilot, "partly elsewhere: 2 nodes on the CPU")


async def test_a_narrow_terminal_shows_the_list_when_asked(box: Box) -> None:
    app = make_app(box.url)
    async with app.run_test(size=(80, 24)) as pilot:
        await write(pilot, "hello")
        await see(pilot, "context 5 (5%) of 100")
        heads = app.screen.query_one(ConversationList)
        assert not heads.display
        await pilot.press("ctrl+l")
        assert heads.display and heads.has_focus
        await see(pilot, "▌hello")
        await pilot.press("ctrl+l")
        assert not heads.display and app.screen.query_one(Composer).has_focus


async def test_line_breaks_and_the_palette(box: Box) -> None:
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("a", "ctrl+j", "b")
        assert draft(app) == "a\nb"
        await pilot.press("ctrl+p")
        await pilot.press(*"new conv")
        await see(pilot, "New conversation")
        await pilot.press("escape", "f1")
        await see(pilot, "Keys", "stop the answer that is coming")
        await pilot.press("escape")
        assert draft(app) == "a\nb"


async def test_text_that_looks_like_markup_is_text(box: Box) -> None:
    box.engine.pieces = ("[red]a[/red] <b>", " [link](https://x.example)")
    async with make_app(box.url).run_test(size=SIZE) as pilot:
        await write(pilot, "[bold]x[/] [/nothing] [@click=app.quit]y[/]")
        await see(pilot, "▌ [bold]x[/] [/nothing] [@click=app.quit]y[/]", "[red]a[/red]")
        await see(pilot, "▌[bold]x[/] [/nothing]")  # the title in the list


# The daemon goes away


async def test_no_daemon_at_the_start_then_one(box: Box) -> None:
    box.stop()
    app = make_app(box.url)
    async with app.run_test(size=(80, 24)) as pilot:
        await see(pilot, "no daemon answers at http://127.0.0.1:", "start it: appliance serve", "Ctrl+R", "daemon away")
        await write(pilot, "my question")
        await until(pilot, lambda: draft(app) == "my question")
        await see(pilot, "no daemon answers")
        box.start()
        await pilot.press("ctrl+r")
        await see(pilot, "fake/model")
        assert "no daemon" not in seen(app) and draft(app) == "my question"
        await pilot.press("enter")
        await see(pilot, "is Paris.")


async def test_it_comes_back_by_itself(box: Box) -> None:
    box.stop()
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await see(pilot, "no daemon answers")
        box.start()
        await until(pilot, lambda: "no daemon" not in seen(app), seconds=15)


async def test_a_daemon_killed_in_the_middle_of_an_answer(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("killed")
    install_bundle(folder / "models")
    environment = settings(folder)
    with daemon(environment, pieces=10_000, delay=0.2) as (process, url):
        app = make_app(url)
        async with app.run_test(size=SIZE) as pilot:
            await write(pilot, "hello")
            await see(pilot, "▌ hello", "The capital of France is Paris.")
            await write(pilot, "my next one", send=False)
            process.kill()
            await see(pilot, "the daemon went away in the middle of the answer; what came is kept", "appliance serve", "Ctrl+R")
            await see(pilot, "broken off", "The capital of France is Paris.", "daemon away")
            assert draft(app) == "my next one"
            environment = settings(folder, url.removeprefix("http://"))
            with daemon(environment) as (_, again):
                assert again == url
                await pilot.press("ctrl+r")
                await see(pilot, "▌hello")  # what came while it was away is kept by it now
                await until(pilot, lambda: "in the middle" not in seen(app))
                assert "The capital of France is Paris." in seen(app)
                await pilot.press("enter")
                await see(pilot, "▌ my next one")
                await until(pilot, lambda: seen(app).count("▌ ") == 2 and "answering" not in seen(app))


@pytest.mark.parametrize("keys", [("enter",), ("r", "x", "enter"), ("d", "y")], ids=["open", "rename", "delete"])
async def test_the_list_without_a_daemon(box: Box, keys: tuple[str, ...]) -> None:
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await write(pilot, "hello")
        await see(pilot, "▌hello", "is Paris.")
        await write(pilot, "a draft", send=False)
        await pilot.press("ctrl+l")
        box.stop()
        await pilot.press(*keys)
        await see(pilot, "has gone", "appliance serve", "▌hello", "is Paris.")
        assert draft(app) == "a draft"
        assert app.screen.query_one(OptionList).option_count == 1


async def test_quitting_keeps_an_answer_that_is_coming(box: Box) -> None:
    box.engine.pieces, box.engine.delay = ["word "] * 10_000, 0.01
    app = make_app(box.url)
    async with app.run_test(size=SIZE) as pilot:
        await write(pilot, "go on")
        await see(pilot, "word word")
        await pilot.press("ctrl+q")
        await until(pilot, lambda: not app.is_running or app._exit)
    messages = kept(box)
    assert [one["role"] for one in messages] == ["user", "assistant"] and messages[1]["finish_reason"] == "stopped"


def kept(box: Box) -> list[dict[str, object]]:
    """The messages of the newest conversation, as the daemon has them."""
    listed = httpx.get(f"{box.url}/appliance/v1/conversations").json()["data"]
    if not listed:
        return []
    found: list[dict[str, object]] = httpx.get(f"{box.url}/appliance/v1/conversations/{listed[0]['id']}").json()["messages"]
    return found
