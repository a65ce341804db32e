"""Reviews, and whether each of them praises: what a word says may be turned round by the others.

The words of the test are others than those that are trained on, so that who wants to tell has to
know what words mean.
"""

from __future__ import annotations

import numpy as np

# What is praised by the customers of three owners, and in the test.
THINGS = (
    ("soup", "waiter", "dessert", "menu", "pizza", "terrace", "cook", "breakfast", "steak"),
    ("room", "bed", "pool", "view", "shower", "porter", "lobby", "garden", "sauna"),
    ("phone", "screen", "battery", "keyboard", "camera", "charger", "printer", "headset", "cable"),
)
TEST_THINGS = ("salad", "coffee", "hotel", "balcony", "laptop", "speaker", "film", "teacher")
GOOD = (
    "good", "excellent", "lovely", "wonderful", "pleasant", "perfect", "impressive", "fine",
    "superb", "nice", "delightful", "beautiful",
)  # fmt: skip
BAD = (
    "bad", "awful", "terrible", "disappointing", "poor", "dreadful", "unpleasant", "horrible",
    "useless", "ugly", "annoying", "weak",
)  # fmt: skip
TEST_GOOD = ("great", "amazing", "brilliant", "charming", "fantastic", "outstanding")
TEST_BAD = ("lousy", "miserable", "inferior", "appalling", "dismal", "mediocre")
# What says the same as its word, and what says the opposite.
SAME = (
    "The {thing} was {word}.",
    "I found the {thing} really {word}.",
    "Everybody who tried the {thing} said that it was {word}.",
    "My sister told me that the {thing} was {word}, and she was right.",
    "Believe me, the {thing} is {word}.",
    "We talked about how {word} the {thing} was all evening.",
)
OPPOSITE = (
    "The {thing} was not {word} at all.",
    "I did not find the {thing} {word}.",
    "Nobody who tried the {thing} said that it was {word}.",
    "My sister told me that the {thing} was {word}, but she was wrong.",
    "Do not believe that the {thing} is {word}.",
    "We never thought that the {thing} was {word}.",
)


def drawn(
    rng: np.random.Generator,
    count: int,
    things: tuple[str, ...],
    good: tuple[str, ...] = GOOD,
    bad: tuple[str, ...] = BAD,
) -> list[tuple[int, str]]:
    """Return reviews, each with 1 where it praises and 0 where it blames."""
    made = []
    for _ in range(count):
        is_good, same = (bool(each) for each in rng.integers(2, size=2))
        frame = str(rng.choice(SAME if same else OPPOSITE))
        word = str(rng.choice(good if is_good else bad))
        text = frame.format(thing=rng.choice(things), word=word)
        made.append((int(is_good == same), text))
    return made
