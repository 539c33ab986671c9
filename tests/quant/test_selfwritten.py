"""Text that a model writes itself: what a row says, that rows do not touch each other, and that a stopped run goes on."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from appliance.bundle import store
from appliance.errors import RequestError
from appliance.runtime.chat_template import ChatTemplate
from appliance.runtime.tokenizer import load_tokenizer
from appliance.targets import load
from export import arch, slices
from export.checkpoint import open_checkpoint
from export.stages import calibration
from export.stages.job import BuildRequest, Job
from export.tokenizer import write_tokenizer
from quant import decide, emit, selfwritten
from quant.calibration_text import CalibrationText, of_record
from quant.layers import Running, cut
from quant.scheme import Options
from quant.schemes import find
from quant.selfwritten import Turns, Wish, draw, rows_at_once, turns_of
from tests.checkpoints import Llama, write_safetensors

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def words(special: frozenset[int] = frozenset({0, 1, 2}), eos: tuple[int, ...] = (2,), add_bos: bool = True) -> Any:
    """A tokenizer of 40 words whose first three are special; text is cut into characters."""
    info = SimpleNamespace(bos=1, eos=eos, add_bos=add_bos)

    def encode(text: str, *, special: bool = True, bos: bool | None = None) -> list[int]:
        return [3 + ord(letter) % 37 for letter in text]

    return SimpleNamespace(info=info, vocab_size=40, special_ids=special, encode=encode)


def wanting(token: int) -> np.ndarray:
    logits = np.zeros(40, np.float32)
    logits[token] = 50
    return logits


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    logits = np.random.default_rng(seed).standard_normal(40).astype(np.float32) * 2
    drawn = [draw(logits.copy(), number) for number in np.linspace(0, 1, 20001)[:-1]]
    weights = np.exp(logits - logits.max())
    weights[weights < 0.02] = 0
    assert np.abs(np.bincount(drawn, minlength=40) / 20000 - weights / weights.sum()).max() < 2e-3, f"seed {seed}"
    barred = np.full(40, -np.inf, np.float32)
    barred[7] = 3
    assert draw(barred, 0.5) == 7


def test_plain_text_begins_with_the_begin_token_and_so_again_after_an_end() -> None:
    row = selfwritten._Row(5, Wish(8, 16, 0), None, words())
    assert [row.next(None), row.next(wanting(9)), row.next(wanting(8))] == [1, 9, 8]
    assert [row.next(wanting(2)), row.next(wanting(9)), row.next(wanting(9))] == [2, 1, 9]


def test_without_a_begin_token_a_row_begins_with_a_frequent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfwritten, "_FREQUENT", 20)
    first = [selfwritten._Row(n, Wish(8, 16, 0), None, words(add_bos=False)).next(None) for n in range(200)]
    assert set(first) == set(range(3, 23))


def test_a_row_that_repeats_itself_begins_anew() -> None:
    row = selfwritten._Row(0, Wish(8, 400, 0), None, words())
    row.next(None)
    said = [row.next(wanting(5 + step % 7)) for step in range(40)]
    assert said.index(1) == 7 + 12, "a round of seven, and twelve tokens of the next"
    assert said[:19] == [5 + step % 7 for step in range(19)]
    row = selfwritten._Row(0, Wish(8, 400, 0), None, words())
    row.next(None)
    assert 1 not in [row.next(wanting(int(token))) for token in np.random.default_rng(1).integers(3, 40, 300)]


def test_special_tokens_but_ends_are_never_drawn() -> None:
    row = selfwritten._Row(0, Wish(8, 16, 0), None, words(special=frozenset({0, 1, 2, 30})))
    row.next(None)
    logits = wanting(30)
    logits[11] = 40
    assert row.next(logits) == 11


def test_turns_are_taken_when_an_end_is_drawn_or_the_user_talks_too_long() -> None:
    turns = Turns((10, 11), (12, 13), (14, 15))
    row = selfwritten._Row(0, Wish(8, 400, 8), turns, words())
    assert [row.next(None), row.next(None)] == [10, 11]
    assert [row.next(wanting(20)), row.next(wanting(2)), row.next(None), row.next(wanting(21))] == [20, 12, 13, 21]
    assert [row.next(wanting(2)), row.next(None), row.next(wanting(22))] == [14, 15, 22]
    talk = [row.next(wanting(int(token))) for token in np.random.default_rng(1).integers(23, 40, 80)]
    assert talk.index(12) == 62 and talk[62:64] == [12, 13] and min(talk[64:]) >= 23


def test_the_templates_words_around_the_turns() -> None:
    found = turns_of(ChatTemplate(CHATML, {}), words())
    encode = words().encode
    assert found == Turns(
        tuple(encode("<|im_start|>user\n")),
        tuple(encode("<|im_end|>\n<|im_start|>assistant\n")),
        tuple(encode("<|im_end|>\n<|im_start|>user\n")),
    )


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "{{ raise_exception('no') }}", "{{ messages[1].content }}{{ messages[0].content }}"]
)
def test_a_template_that_does_not_show_turns_in_order_gives_none(source: str) -> None:
    assert turns_of(ChatTemplate(source, {}), words()) is None
    assert turns_of(None, words()) is None


def test_rows_at_once_are_chosen_by_memory() -> None:
    state: Any = [SimpleNamespace(dtype="float32", shape=("batch", 3, "context", 64))] * 60
    assert rows_at_once(state, Wish(64, 512, 0)) == 17
    assert rows_at_once(state, Wish(2, 512, 0)) == 2
    huge: Any = [SimpleNamespace(dtype="float32", shape=("batch", 64, "context", 256))] * 60
    assert rows_at_once(huge, Wish(64, 8192, 0)) == 1
    assert rows_at_once(state, Wish(999, 16, 0)) == 32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writes") / "tiny"
    write_safetensors(folder, Llama(2, 64, 2, 1, 96, vocab=512), "float16", tokenizer=True)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def job(source: Path, folder: Path) -> Job:
    folder.mkdir(exist_ok=True)
    opened = arch.open_model(open_checkpoint(source))
    request = BuildRequest(source, (load("cpu"),), find("w4a8-gptq"), folder / "m", "m", 0, "", calibration_tokens=1024)
    request.work.mkdir(exist_ok=True)
    writer = store.BundleWriter(request.destination)
    writer.folder.mkdir(exist_ok=True)
    tokenizer = write_tokenizer(opened.checkpoint, writer)
    return Job(request, opened, writer, lambda *_: None, {"a": "b"}, tokenizer, request.scheme)


def written(source: Path, folder: Path, wish: Wish) -> CalibrationText:
    made = job(source, folder)
    return selfwritten.write_text(
        lambda: calibration._writer(made, wish.window), calibration._words(made), wish, made.request.work, "source"
    )


def test_what_a_row_says_does_not_depend_on_the_other_rows(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = Wish(5, 48, turns=2)
    together = written(tiny, tmp_path / "together", wish)
    monkeypatch.setattr(selfwritten, "_MOST_ROWS", 2)
    by_two = written(tiny, tmp_path / "by-two", wish)
    assert together.ids.shape == (5, 48) and np.array_equal(together.ids, by_two.ids)
    assert len({tuple(row) for row in together.ids.tolist()}) == 5
    other = written(tiny, tmp_path / "other", replace(wish, seed=2))
    assert not np.array_equal(other.ids, together.ids)
    assert together.told["in_turns"] == 2 and together.told["seed"] == 1


def test_each_token_is_drawn_from_what_the_model_says_after_all_before_it(tiny: Path, tmp_path: Path) -> None:
    """The same rows again, with logits of the whole text in one run of the writer's own integers."""
    wish, made = Wish(3, 40, turns=1), job(tiny, tmp_path / "a")
    text = written(tiny, tmp_path / "a", wish)
    model = made.model()
    scheme = replace(find("w8a8", Options(group=32)), solver="nearest")
    decide.decide(model, scheme, load("cpu"), tmp_path / "again")
    x: np.ndarray = text.ids
    for part in cut(model):
        x = Running(part.build(streams=False), slices.opener(wish.window, tmp_path, emit.emit)).run(x).hidden
    tokenizer = load_tokenizer(calibration._words(made))
    turns = turns_of(ChatTemplate(CHATML, {}), tokenizer)
    same = 0
    for number, ids in enumerate(text.ids):
        row = selfwritten._Row(number, wish, turns if number < 1 else None, tokenizer)
        for step, token in enumerate(ids):
            same += row.next(x[number, step - 1].copy() if step else None) == token
    assert same >= 0.95 * text.ids.size, "a number at the border of two tokens may fall to either"


def test_rows_of_turns_begin_as_the_template_does(tiny: Path, tmp_path: Path) -> None:
    made = job(tiny, tmp_path / "a")
    text = written(tiny, tmp_path / "a", Wish(4, 64, turns=2))
    tokenizer = load_tokenizer(calibration._words(made))
    begins = tuple(tokenizer.encode("<|im_start|>user\n", special=True, bos=False))
    assert [tuple(row[: len(begins)]) == begins for row in text.ids] == [True, True, False, False]


def test_finished_batches_are_not_written_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfwritten, "_MOST_ROWS", 2)
    wish, batches, run = Wish(6, 32, turns=0), [], selfwritten._batch

    def stop_at_the_third(*given: Any) -> Any:
        batches.append(1)
        if len(batches) == 3:
            raise KeyboardInterrupt
        return run(*given)

    monkeypatch.setattr(selfwritten, "_batch", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        written(tiny, tmp_path / "a", wish)
    found = written(tiny, tmp_path / "a", wish)
    assert len(batches) == 4, "the third alone was written anew"
    monkeypatch.setattr(selfwritten, "_batch", run)
    assert np.array_equal(found.ids, written(tiny, tmp_path / "b", wish).ids)
    next((tmp_path / "a").rglob("text.*.npy")).write_bytes(b"short")
    assert np.array_equal(found.ids, written(tiny, tmp_path / "a", wish).ids)


def test_a_text_comes_back_from_its_record() -> None:
    text = CalibrationText("self-written", np.arange(12).reshape(3, 4), {"seed": 1, "in_turns": 0})
    assert of_record(text.record(), "here").record() == text.record()


def test_a_template_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def render(self, *_: object) -> str:
            raise RequestError("no", "nothing")

    assert turns_of(Refusing(), words()) is None  # type: ignore[arg-type]
