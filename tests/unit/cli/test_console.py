"""What a terminal may be shown of anybody's text."""

import io

import pytest

from torchinstruments.cli.console import print_table, shown_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fc.weight é 層", "fc.weight é 層"),
        ("[bold red]x[/]", "[bold red]x[/]"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("two\nlines\r", "two\\nlines\\r"),
        ("\u202eabc\u2028", "\\u202eabc\\u2028"),
        ("a\x00b\udce9", "a\\x00b\\udce9"),
        ("", ""),
    ],
)
def test_control_characters_are_escaped(text: str, expected: str) -> None:
    """Letters of any language stay, what moves a cursor or turns the line does not."""
    assert shown_text(text) == expected


def test_long_texts_lose_their_middle() -> None:
    """Both ends of a name tell it apart."""
    assert shown_text("a" * 600 + "b" * 600) == "a" * 500 + "..." + "b" * 500
    assert shown_text("a" * 1000) == "a" * 1000


def test_cells_of_a_table_are_such_texts() -> None:
    """A cell is neither markup nor a page of its own."""
    file = io.StringIO()
    print_table(["layer"], [["\x1b[2J[red]x"], ["y" * 10_000]], file=file)
    out = file.getvalue()
    assert "\\x1b[2J[red]x" in out
    assert "\x1b" not in out
    assert len(out) < 1500
