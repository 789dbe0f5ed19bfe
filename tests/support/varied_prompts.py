"""Sixty prompts as people and programs write them: chats, code, lists, numbers, many scripts."""

from __future__ import annotations

_CHATS = (
    "What is the capital of France?",
    "Explain gravity to a child.",
    "Write a haiku about the sea.",
    "Give me three names for a cat.",
    "Translate 'good morning' into Spanish.",
    "How do I boil an egg?",
    "Is 91 a prime number?",
    "Summarise: The train was late because of snow, and everybody missed the meeting.",
    "Hi",
    "Tell me a joke about computers.",
    "Which is larger, 9.9 or 9.11?",
    "Write one sentence without the letter e.",
    "What does HTTP 404 mean?",
    "Répondez en français : quelle heure est-il ?",
    "Wie heißt die Hauptstadt von Österreich?",
    "¿Cuántos días tiene febrero?",
)
_CODE = (
    "def fibonacci(n):\n    ",
    "for (int i = 0; i < n; i++) {\n",
    "SELECT name, COUNT(*) FROM orders WHERE ",
    '{"name": "Ada", "age": 36, "tags": [',
    "<html>\n<head>\n<title>",
    "import numpy as np\n\nx = np.",
    "fn main() {\n    let mut total = 0;\n",
    "#!/bin/sh\nset -eu\nfor file in *.txt; do\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "| city | people |\n|---|---|\n| Paris | ",
)
_LISTS = (
    "1. apples\n2. pears\n3.",
    "- Monday\n- Tuesday\n-",
    "red, green, blue,",
    "A, B, C, D, E,",
    "Ingredients:\n* flour\n* eggs\n*",
    "First, second, third,",
)
_NUMBERS = (
    "2 + 2 =",
    "1, 1, 2, 3, 5, 8,",
    "3.14159",
    "2024-01-01\n2024-01-02\n",
    "7 x 8 = 56\n7 x 9 =",
    "0000 0001 0010 0011",
    "$1,299.00 plus 19% is",
)
_SCRIPTS = (
    "Le petit prince habitait",
    "Der schnelle braune Fuchs",
    "Она открыла дверь и",
    "今日の天気は",
    "北京是中国的",
    "안녕하세요, 저는",
    "مرحبا بك في",
    "שלום עולם",
    "नमस्ते, आप कैसे",
    "Η Αθήνα είναι",
    "สวัสดีครับ",
    "Xin chào, tôi là",
    "🎉🎂 Happy birthday 🎈",
)
_WORDS = ("The", "Once", "Hello", "import", "Zürich", " ")


def _chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _long() -> tuple[str, ...]:
    """Two texts of more than 600 tokens."""
    places = ("river", "harbour", "market", "tower", "garden", "station", "library", "bridge")
    story = " ".join(
        f"On day {day} we walked from the {places[day % 8]} to the {places[day * 3 % 8]}, where "
        f"{day * 7} people waited."
        for day in range(1, 31)
    )
    table = "\n".join(f"row {row}: {row * row}, {row * 37 % 101}" for row in range(1, 51))
    return f"{story} On day 31 we", f"{table}\nrow 51:"


VARIED_PROMPTS = (*map(_chat, _CHATS), *_CODE, *_LISTS, *_NUMBERS, *_SCRIPTS, *_WORDS, *_long())
