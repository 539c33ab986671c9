"""Makes the demo's documents that cannot be written by hand: python -m tests.demo.make_samples [FOLDER].

Knows: the words, and how Word and PDF files are written. Does not know: who reads them.
The results are committed, so the demo needs neither this nor its libraries; a test makes them again and compares the text.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

SAMPLES = Path(__file__).parents[2] / "demo" / "samples"
WRITTEN = datetime(2026, 11, 2, 9, 0)
"""Date inside the files, so that making them again makes the same."""


@dataclass(frozen=True)
class Section:
    """A heading and its paragraphs; `new_page` where a PDF begins another page with it."""

    heading: str
    paragraphs: tuple[str, ...]
    new_page: bool = False


OVEN = (
    Section(
        "1. Overview",
        (
            "This manual covers the deck oven with two decks and its steam generator. It is meant for trained bakery staff. "
            "Work on the burner and on the electrical cabinet is reserved for the maintenance company.",
            "Rated power is 38 kW. The highest chamber temperature is 300 degrees Celsius.",
        ),
    ),
    Section(
        "2. Daily and weekly care",
        (
            "Brush the stone slabs every day when they are below 60 degrees. Never pour water on a hot slab: it cracks.",
            "Wipe the door seals once a week with a damp cloth and check them for cracks. A damaged seal must be replaced "
            "within seven days, because escaping steam corrodes the front panel.",
        ),
    ),
    Section(
        "3. Steam generator",
        (
            "Descale the steam generator every 250 hours of operation with citric acid, 50 grams to a litre of water. "
            "Rinse twice before the next baking.",
            "If the display shows E07, the water inlet is blocked: close the tap, clean the sieve, open the tap slowly.",
        ),
        new_page=True,
    ),
    Section(
        "4. Uneven heat",
        (
            "If one corner of a deck bakes lighter than the others, measure the slab at its four corners after one hour "
            "at 240 degrees. A difference of more than 12 degrees points to a worn heating element.",
            "Heating elements are replaced in pairs. The part number for the lower deck is HE-2240-L.",
        ),
        new_page=True,
    ),
)
VAN = (
    Section(
        "Inspection report: delivery van",
        (
            "Date of inspection: 21 October 2026. Odometer: 64,210 km. Result: passed with minor defects.",
            "The tread depth of the front tyres is 3.1 mm and of the rear tyres 4.4 mm. The front tyres should be replaced "
            "before winter.",
            "The left low beam is set too high. It was corrected during the inspection.",
            "The battery of the drive has 91 % of its original capacity. The next inspection is due in October 2028.",
        ),
    ),
)
FLOUR = (
    Section(
        "Subject of the agreement",
        (
            "The mill supplies the bakery with wheat flour type 550, rye flour type 1150 and whole spelt flour.",
            "The agreement runs from 1 January 2027 to 31 December 2027.",
        ),
    ),
    Section(
        "Quantities and prices",
        (
            "The bakery takes at least 1,800 kg of flour a month. Wheat flour costs 0.62 euros a kilogram, rye flour "
            "0.58 euros and spelt flour 1.34 euros, delivery included.",
            "Prices are fixed for six months. After that they may change by no more than 4 % a quarter.",
        ),
    ),
    Section(
        "Delivery",
        (
            "Flour is delivered on Tuesdays between 9:00 and 11:00 in sacks of 25 kg. Damaged sacks are taken back at the door.",
            "If a delivery fails, the mill pays the difference to the price of a replacement bought elsewhere.",
        ),
    ),
    Section(
        "Notice",
        ("Either side may end the agreement with three months' notice to the end of a quarter. Notice must be in writing.",),
    ),
)


def write_pdf(path: Path, title: str, sections: Sequence[Section]) -> None:
    """A PDF with text, not pictures of it."""
    from reportlab.lib.pagesizes import A4
    from reportlab.lib.styles import getSampleStyleSheet
    from reportlab.platypus import Flowable, PageBreak, Paragraph, SimpleDocTemplate, Spacer

    styles = getSampleStyleSheet()
    flow: list[Flowable] = [Paragraph(title, styles["Title"])]
    for section in sections:
        flow += [PageBreak()] if section.new_page else []
        flow += [Paragraph(section.heading, styles["Heading2"])]
        for text in section.paragraphs:
            flow += [Paragraph(text, styles["BodyText"]), Spacer(1, 6)]
    SimpleDocTemplate(str(path), pagesize=A4, title=title, invariant=1).build(flow)


def write_docx(path: Path, title: str, sections: Sequence[Section]) -> None:
    """A Word file with real headings."""
    import docx

    document = docx.Document()
    document.core_properties.created = document.core_properties.modified = WRITTEN
    document.core_properties.author = ""
    document.add_heading(title, level=0)
    for section in sections:
        document.add_heading(section.heading, level=1)
        for text in section.paragraphs:
            document.add_paragraph(text)
    document.save(str(path))


def make(folder: Path) -> None:
    """Write every made sample to `folder`."""
    write_pdf(folder / "deck-oven-manual.pdf", "Deck oven: operation and maintenance", OVEN)
    write_pdf(folder / "van-inspection.pdf", "Delivery van", VAN)
    write_docx(folder / "flour-supply-agreement.docx", "Flour supply agreement", FLOUR)


def main(arguments: Sequence[str]) -> int:
    """Make the samples where the demo looks for them, or in the folder named."""
    make(Path(arguments[0]) if arguments else SAMPLES)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
