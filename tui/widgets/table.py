"""A table whose rows are known by a key.

Knows: how rows are replaced without losing the place. Does not know: what is in them.
"""

from collections.abc import Iterable, Sequence

from rich.text import Text
from textual.widgets import DataTable


class Table(DataTable[Text]):
    """Rows of plain text, one of them marked; Enter chooses it.

    Args:
        columns: title and width of each; 0 = as wide as its widest cell.
    """

    def __init__(self, title: str, columns: Sequence[tuple[str, int]], id: str) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=True)
        self._titles = columns
        self.border_title = title

    def on_mount(self) -> None:
        for title, width in self._titles:
            self.add_column(title, width=width or None)

    @property
    def marked(self) -> str | None:
        """Key of the marked row; None in an empty table."""
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def show(self, rows: Iterable[tuple[str, Sequence[str]]]) -> None:
        """Replace all rows, each a key and its cells; the marked one stays marked while it is there."""
        before = self.marked
        self.clear()
        for key, cells in rows:
            self.add_row(*(Text(cell) for cell in cells), key=key)
        if before is not None and before in self.rows:
            self.move_cursor(row=self.get_row_index(before))
