"""Text that no file can hold as it is."""

import json

from torchinstruments.records import ErrorRecord
from torchinstruments.store.manifest import encode_document
from torchinstruments.store.texts import encodable, encodable_texts


def test_sound_text_stays_as_it_is() -> None:
    """Beyond ASCII and beyond the first plane too."""
    texts = ("", "Schicht/é", "😀")
    assert (encodable_texts(texts), [encodable(text) for text in texts]) == (texts, list(texts))


def test_a_lone_surrogate_is_escaped() -> None:
    """As Python escapes it; its neighbours stay."""
    assert encodable_texts(("é", "caf\udce9", "\ud83d")) == ("é", "caf\\udce9", "\\ud83d")


def test_two_halves_in_neighbouring_texts_are_no_character() -> None:
    """They are looked at together, and yet are not one."""
    assert encodable_texts(("\ud83d", "\ude00")) == ("\\ud83d", "\\ude00")


def test_a_document_with_a_lone_surrogate_is_written() -> None:
    """In a key, in a list and in a record below it; what is no text stays what it is."""
    document = {
        "k\udce9": [ErrorRecord("sink", "m\udce9", "E", "x"), 1, 2.5, None, True],
        "n": {"\udce9": ()},
    }
    found = json.loads(encode_document(document))
    assert found["k\\udce9"][0]["module"] == "m\\udce9"
    assert found["k\\udce9"][1:] == [1, 2.5, None, True]
    assert found["n"] == {"\\udce9": []}
