"""Words for the index and for the question: every script finds its words, and no question is an FTS5 expression."""

import apsw
import hypothesis
import pytest
from hypothesis import strategies

from appliance.knowledge.terms import TOKENIZER, question, segmented


def hits(text: str, asked: str) -> bool:
    connection = apsw.Connection(":memory:")
    connection.execute(
        f"""CREATE VIRTUAL TABLE words USING fts5(body, content='', contentless_delete=1, tokenize="{TOKENIZER}")"""
    )
    connection.execute("INSERT INTO words(rowid, body) VALUES(1, ?)", (segmented(text),))
    expression = question(asked)
    return bool(expression and connection.execute("SELECT 1 FROM words WHERE words MATCH ?", (expression,)).fetchall())


FOUND = {
    "two Han characters": ("東京都は日本の首都です。", "首都"),
    "Han across a word's end": ("显存不足的错误", "存不"),
    "one Han character, first": ("水がある", "水"),
    "one Han character, last": ("飲み水", "水"),
    "katakana": ("新しいコンピュータを買う", "コンピュータ"),
    "half-width katakana": ("ｺﾝﾋﾟｭｰﾀ", "コンピュータ"),
    "Hangul with a particle": ("서울은 한국의 수도이다", "서울"),
    "Thai": ("ไฟฟ้าดับทั้งเมือง", "เมือง"),
    "two Thai characters": ("ซื้อยาที่ร้าน", "ยา"),
    "Hindi with vowel signs": ("हिन्दी में लिखें", "हिन्दी"),
    "accents left out": ("Le café est fermé", "cafe ferme"),
    "accents written apart": ("Le cafe\u0301 est ferme\u0301", "café"),
    "accents that the text lacks": ("Grosse cafe", "café"),
    "umlauts and case": ("Die GRÖSSE der Tür", "größe tür"),
    "full-width letters": ("ＧＰＵ", "gpu"),
    "Cyrillic": ("Договор аренды", "договор"),
    "Latin beside Han": ("GPU显存", "gpu"),
    "a number": ("Artikel 4711", "4711"),
}


@pytest.mark.parametrize("case", FOUND)
def test_words_are_found(case: str) -> None:
    assert hits(*FOUND[case])


@pytest.mark.parametrize(
    ("text", "asked"), [("東京", "京東"), ("हिन्दी", "हि"), ("contract", "tract"), ("北京", "東京"), ("abc", "…")]
)
def test_what_is_not_there_is_not_found(text: str, asked: str) -> None:
    assert not hits(text, asked)


@hypothesis.given(strategies.text(max_size=200))
@hypothesis.settings(deadline=None, max_examples=200)
def test_no_question_breaks_the_index(asked: str) -> None:
    hits("some text 文字", asked)


@pytest.mark.parametrize("asked", ['"', "a NEAR b", "title:x", "(", "a* AND -b", "NOT", "x' OR 1=1 --", "^a"])
def test_operators_are_words(asked: str) -> None:
    assert hits("a near b not x title or and 1", asked) or not any(one.isalnum() for one in asked)
