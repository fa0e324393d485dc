"""Write the sentences of the demo: translations of Django in 20 languages, cleaned, each language's longest.

    pip install django==5.2.19
    python experiments/demo_sentences.py

Another version of Django has other sentences, and so gives the demo another model.
"""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from greedy_gnorm.demo import SENTENCES, Recipe, Sentences

FOLDERS = {"ar": "ar", "bg": "bg", "de": "de", "el": "el", "en": "en_AU", "es": "es", "fr": "fr", "hi": "hi"}
FOLDERS |= {"it": "it", "ja": "ja", "nl": "nl", "pl": "pl", "pt": "pt", "ru": "ru", "sw": "sw", "th": "th"}
FOLDERS |= {"tr": "tr", "ur": "ur", "vi": "vi", "zh": "zh_Hans"}
"""The catalogue folder of each language."""

PLACEHOLDER = re.compile(r"%\(\w+\)[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]?|%[%a-z]|\{[^{}]*\}")
MARKUP = re.compile(r"<[^<>]+>|&#?\w+;")
EMPTY_PAIR = re.compile(r"""[“”„"«»'\u2018\u2019`(\[\uff08]\s*[“”„"«»'\u2018\u2019`)\]\uff09]""")
LEAST_LETTERS = 5


def corpus() -> Sentences:
    """Return (sentence, language) pairs from Django's catalogues: each language's longest, in a fixed order."""
    catalogues = sorted(_django_folder().rglob("*.mo"), key=lambda path: path.as_posix())
    found = {language: _sentences(language, catalogues) for language in FOLDERS}
    languages_with = Counter(key for sentences in found.values() for key in sentences)
    pairs: Sentences = []
    for language, sentences in found.items():
        unambiguous = [text for key, text in sentences.items() if languages_with[key] == 1]
        unambiguous.sort(key=lambda text: (-len(text), text))
        pairs += [(text, language) for text in unambiguous[: Recipe.per_language]]
    return pairs


def _django_folder() -> Path:
    """Find the installed Django without importing it."""
    spec = importlib.util.find_spec("django")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The sentences are those of Django: pip install django==5.2.19")
    return Path(spec.submodule_search_locations[0])


def _sentences(language: str, catalogues: list[Path]) -> dict[str, str]:
    """Collect one language's cleaned sentences, keyed by their case-folded text."""
    sentences: dict[str, str] = {}
    for catalogue in catalogues:
        if catalogue.parts[-3] != FOLDERS[language]:  # .../locale/<folder>/LC_MESSAGES/<name>.mo
            continue
        for source, translation in _messages(catalogue.read_bytes()):
            text = clean(translation)
            untranslated = language != "en" and text == clean(source)
            if letters(text) >= LEAST_LETTERS and not untranslated:
                sentences.setdefault(text.casefold(), text)
    return sentences


def _messages(mo: bytes) -> Iterator[tuple[str, str]]:
    """Yield (source, translation) from a compiled gettext catalogue, each plural form on its own."""
    order = "<" if mo[:4] == b"\xde\x12\x04\x95" else ">"
    count, sources, translations = struct.unpack_from(f"{order}3I", mo, 8)

    def text(table: int, index: int) -> str:
        length, start = struct.unpack_from(f"{order}2I", mo, table + 8 * index)
        return mo[start : start + length].decode()

    for index in range(count):
        source = text(sources, index).rpartition("\x04")[2].split("\0")
        if source != [""]:  # the empty source holds the catalogue's header
            for number, form in enumerate(text(translations, index).split("\0")):
                yield source[min(number, len(source) - 1)], form


def clean(text: str) -> str:
    """Remove placeholders, mark-up and the empty quotes they leave, and collapse white space."""
    for pattern in (MARKUP, PLACEHOLDER, EMPTY_PAIR):
        text = pattern.sub(" ", text)
    return " ".join(text.split())


def letters(text: str) -> int:
    """Count letters, vowel signs included."""
    return sum(unicodedata.category(character)[0] in "LM" for character in text)


def as_lines(pairs: Sentences) -> str:
    """The content of the file."""
    return "".join(f"{language}\t{text}\n" for text, language in pairs)


if __name__ == "__main__":
    SENTENCES.write_text(as_lines(corpus()), encoding="utf-8")
