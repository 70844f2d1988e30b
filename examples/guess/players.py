"""Print the share of GEM's GuessTheNumber games, 1 to 10 in 4 turns, that scripted players win.

python examples/guess/players.py
"""

import random

from whet.tasks.environment import load_environment

ANY = range(1, 11)


def at_random(turns):
    """Any number."""
    return ANY


def by_last_hint(turns):
    """Any number on the side that the last answer names; any at all if it names none, after a repeated guess."""
    return [n for n in ANY if not turns or allows(turns[-1], n)]


def by_all_hints(turns):
    """Any number that agrees with all answers."""
    return [n for n in ANY if all(allows(turn, n) for turn in turns)]


def allows(turn, number):
    """Whether a turn, a guess and its answer, leaves a number possible."""
    guess, answer = turn
    return not (("is higher" in answer and number <= guess) or ("is lower" in answer and number >= guess))


def wins(make, choose, seed):
    """Play the game of a seed; ``choose`` returns the numbers of which one is drawn, given the turns so far."""
    game, draws = make(), random.Random(f"player {seed}")  # independent of the game's generator
    game.reset({}, seed)
    turns, is_done, reward = [], False, 0.0
    while not is_done:
        guess = draws.choice(choose(turns))
        answer, reward, is_done = game.step({"role": "assistant", "content": f"\\boxed{{{guess}}}"})
        turns.append((guess, answer))
    return reward == 1


if __name__ == "__main__":
    make, n = load_environment("gem:game:GuessTheNumber-v0-easy"), 5000
    for choose in (at_random, by_last_hint, by_all_hints):
        print(f"{choose.__name__}: {sum(wins(make, choose, 1_000_000 + seed) for seed in range(n)) / n:.1%}")
