"""Kept conversations: order, repetition, other processes and threads, and a file that is not ours."""

import itertools
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import NotFound, RequestError, StorageError
from appliance.store.conversations import Conversations, NewMessage

ANSWER = NewMessage("assistant", "Paris.", "m", "CPUExecutionProvider", "stop", 12, 3, 41.5)


@pytest.fixture
def kept(tmp_path: Path) -> Conversations:
    seconds = itertools.count(100.0)
    return Conversations(tmp_path / "state" / "appliance.db", lambda: next(seconds))


def test_the_list_has_the_newest_first_and_appending_makes_one_newest(kept: Conversations) -> None:
    first, second = kept.create("one", "m"), kept.create("two")
    assert [head.title for head in kept.heads()] == ["two", "one"]
    kept.append(first.id, NewMessage("user", "hello"))
    assert [(head.title, head.messages) for head in kept.heads()] == [("one", 1), ("two", 0)]
    assert [head.title for head in kept.heads(1)] == ["one"]
    assert kept.rename(second.id, "zwei").title == "zwei"
    assert [head.title for head in kept.heads()] == ["one", "zwei"]  # a new title makes nothing newer
    assert kept.get(first.id).head.model == "m"


def test_equal_times_keep_their_order(tmp_path: Path) -> None:
    kept = Conversations(tmp_path / "a.db", lambda: 5.0)
    titles = [str(number) for number in range(20)]
    for title in titles:
        kept.create(title)
    assert [head.title for head in kept.heads()] == titles[::-1]


def test_everything_of_a_message_comes_back_from_another_connection(kept: Conversations, tmp_path: Path) -> None:
    id = kept.create("a", "m").id
    kept.append(id, NewMessage("user", "where?"))
    kept.append(id, ANSWER)
    kept.close()
    messages = Conversations(tmp_path / "state" / "appliance.db").get(id).messages
    assert [(one.position, one.said) for one in messages] == [(0, NewMessage("user", "where?")), (1, ANSWER)]
    assert messages[0].created < messages[1].created


def test_deleting_takes_the_messages_along(kept: Conversations) -> None:
    id, other = kept.create("a").id, kept.create("b").id
    kept.append(id, ANSWER)
    kept.append(other, ANSWER)
    kept.delete(id)
    assert kept._connection.execute("SELECT count(*) FROM messages").fetchone() == (1,)
    for call in (lambda: kept.get(id), lambda: kept.delete(id), lambda: kept.rename(id, "x"), lambda: kept.append(id, ANSWER)):
        with pytest.raises(NotFound, match=id):
            call()


def test_saying_a_thing_twice_keeps_it_once(kept: Conversations) -> None:
    id = kept.create("a", id="conv_mine").id
    assert id == "conv_mine"
    assert kept.create("another title", id=id).title == "a"
    first = kept.append(id, ANSWER, position=0)
    assert kept.append(id, ANSWER, position=0) == first
    assert kept.append(id, ANSWER).position == 1  # without a place it is one more
    with pytest.raises(RequestError, match="message 0 is another one"):
        kept.append(id, NewMessage("user", "Paris."), position=0)
    with pytest.raises(RequestError, match="message 2 is to come before message 3"):
        kept.append(id, ANSWER, position=3)
    assert len(kept.get(id).messages) == 2


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
def test_any_text_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    kept = Conversations(tmp_path_factory.mktemp("texts") / "a.db")
    id = kept.create("a").id
    for text in texts:
        kept.append(id, NewMessage("user", text))
    assert [one.said.content for one in kept.get(id).messages] == texts
    kept.close()


def test_threads_append_every_message_once(kept: Conversations) -> None:
    id = kept.create("a").id
    threads = [threading.Thread(target=lambda: [kept.append(id, ANSWER) for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.position for one in kept.get(id).messages] == list(range(100))


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "appliance.db"
    path.write_text("something else of mine, long enough to be read as a header of a database" * 50)
    with pytest.raises(StorageError, match="no SQLite database; move it away"):
        Conversations(path)
    assert path.read_text().startswith("something else")
