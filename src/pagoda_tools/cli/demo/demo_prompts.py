"""The prompts of the demo: real text that comes with Python, and a byte-level tokenizer for it."""

from __future__ import annotations

QUESTIONS = (
    "\n\nQuestion: when is __del__ called?\nAnswer:",
    "\n\nQuestion: what should __repr__ return?\nAnswer:",
)
_SUBJECT = "specialnames"  # "Special method names" of the language reference


class ByteTokenizer:
    """Makes one token per byte: ids are bytes. Immutable."""

    vocabulary = 256

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text`."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Return the text of bytes; bytes that are not UTF-8 become a replacement character."""
        return bytes(ids).decode(errors="replace")


def documents() -> tuple[str, str]:
    """Return the text of the questions, and another one for the control. Changes nothing.

    Both are from the Python documentation and have more than 100,000 characters.
    """
    from pydoc_data.topics import topics

    subjects = sorted(
        topics, key=lambda name: (name != _SUBJECT, -len(topics[name]), name)
    )
    texts = [topics[name] for name in subjects]
    return "\n".join(texts), "\n".join(texts[1:])
