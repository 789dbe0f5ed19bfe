"""What can be wrong with the text files of a model, and with a grammar for its outputs."""

from __future__ import annotations


class TextInvalid(ValueError):
    """A tokenizer, chat template or model card that cannot be used.

    The world's fault, found when a model is loaded and never while it serves: the message is a
    sentence that names the file and what to do about it.
    """


class RenderingUnavailable(RuntimeError):
    """No process could render a chat template: none could be started, they were killed from
    outside, they stood still, or this process is going down.

    Shows no fault of the template or the conversation: a later attempt may succeed.
    """


class GrammarInvalid(ValueError):
    """A grammar that cannot be compiled, or that no output can follow; a sentence says why.

    The caller's fault when the edge checks it. Where a worker finds it, another release or another
    model has let it pass.
    """
