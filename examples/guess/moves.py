"""Print games of GEM's GuessTheNumber that a random player plays.

python examples/guess/moves.py > moves.jsonl
"""

import json
import random

from whet.tasks.environment import load_environment

make = load_environment("gem:game:GuessTheNumber-v0-easy")
for seed in range(200):
    game, player = make(), random.Random(f"player {seed}")
    messages = [{"role": "user", "content": game.reset({}, 10**9 + seed)}]
    is_done = False
    while not is_done:
        messages.append({"role": "assistant", "content": f"\\boxed{{{player.randint(1, 10)}}}"})
        text, _, is_done = game.step(messages[-1])
        if not is_done:
            messages.append({"role": "user", "content": text})
    print(json.dumps({"messages": messages}))
