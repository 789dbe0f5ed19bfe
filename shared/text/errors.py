"""What can be wrong with the text files of a model."""

from __future__ import annotations


class TextInvalid(ValueError):
    """A tokenizer, chat template or model card that cannot be used.

    The world's fault, found when a model is loaded and never while it serves: the message is a
    sentence that names the file and what to do about it.
    """
