"""A page as a browser sees it: its elements, cells, cards and what it would fetch."""

from html.parser import HTMLParser
from pathlib import Path

from typing_extensions import override

VOID = {"meta", "img", "source", "link", "br", "hr", "input"}


class ReadPage(HTMLParser):
    """Reads a page; raises AssertionError where an element is closed that is not the open one.

    Attributes:
        tags: names of all elements in order.
        resources: values of all attributes that make a browser fetch or go somewhere.
        cells: rows of text per table.
        cards: label -> (value, note).
        texts: text per element name, joined.
        codes: texts of the commands.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.resources: list[str] = []
        self.cells: list[list[list[str]]] = []
        self.cards: dict[str, tuple[str, str]] = {}
        self.texts: dict[str, str] = {}
        self.codes: list[str] = []
        self._open: list[str] = []
        self._card: list[str] = []
        self.source = path.read_text("utf-8")
        self.feed(self.source)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.tags.append(tag)
        fetching = ("src", "srcset", "href", "data", "poster", "action")
        self.resources += [values[key] for key in fetching if key in values]
        if tag == "table":
            self.cells.append([])
        elif tag == "tr":
            self.cells[-1].append([])
        elif tag in ("td", "th"):
            self.cells[-1][-1].append("")
        elif values.get("class") == "card":
            self._card = []
        elif self._open and values.get("class") in ("label", "value", "small"):
            self._card.append("")
        if tag not in VOID:
            self._open.append(tag)

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1] == tag, f"</{tag}> in <{self._open[-1]}>"
        self._open.pop()
        if tag == "div" and len(self._card) == 3:
            label, value, note = self._card
            self.cards.setdefault(label, (value, note))

    @override
    def handle_data(self, data: str) -> None:
        if not self._open:
            return
        self.texts[self._open[-1]] = self.texts.get(self._open[-1], "") + data
        if self._open[-1] == "code":
            self.codes.append(data)
        if {"td", "th"} & set(self._open):
            self.cells[-1][-1][-1] += data
        elif self._open[-1] == "div" and self._card and data.strip():
            self._card[-1] += data

    def table(self, first_header: str) -> dict[str, dict[str, str]]:
        """The table whose first header is that: rows by their first cell, cells by header."""
        found = [rows for rows in self.cells if rows and rows[0][0] == first_header]
        assert len(found) == 1, f"{len(found)} tables begin with {first_header}"
        headers, *rows = found[0]
        return {row[0]: dict(zip(headers, row, strict=True)) for row in rows}
