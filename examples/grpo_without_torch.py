"""GRPO of LoRA adapters on the sums of two numbers, without torch:

    python examples/grpo_without_torch.py MODEL ADAPTER --steps 20

MODEL is a Hugging Face folder or a .gguf file; the adapters are written to ADAPTER as PEFT does. The engine samples
from the weights that the learner trains on.
"""

import argparse
import random
import re

import numpy as np

import whet
from whet.losses import grpo_loss
from whet.models.tokenizers import load_tokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("adapter")
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

N_PROMPTS, GROUP_SIZE = 8, 8
tokenizer = load_tokenizer(arguments.model)
learner = whet.Learner(arguments.model, lora_rank=16)
engine = whet.Engine.from_model(learner)
draw = random.Random(0)


def encode(question: str) -> list[int]:
    """Return the token ids of a question, as a conversation if the model has a chat template."""
    if not tokenizer.chat_template:
        return tokenizer(question)["input_ids"]
    return tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)[
        "input_ids"
    ]


def reward(answer: str, right: int) -> float:
    """Return 1 if the last number of an answer is right, else 0."""
    numbers = re.findall(r"-?\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == right)


for step in range(1, arguments.steps + 1):
    tasks = [(draw.randrange(50), draw.randrange(50)) for _ in range(N_PROMPTS)]
    prompts = [encode(f"What is {a} + {b}? Answer with the number.") for a, b in tasks]
    engine.sync(learner)
    sampling = whet.SamplingParams(max_new_tokens=32, stop_token_ids=[tokenizer.eos_token_id], seed=step)
    samples = [sample for group in engine.generate(prompts, GROUP_SIZE, sampling) for sample in group]

    answers = [tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in samples]
    sums = [a + b for a, b in tasks for _ in range(GROUP_SIZE)]
    rewards = np.array([reward(answer, right) for answer, right in zip(answers, sums, strict=True)])
    advantages = whet.compute_batch_group_advantages(rewards, GROUP_SIZE)

    prompt_ids = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
    found = learner.logprobs(prompt_ids, [sample.token_ids for sample in samples])
    loss = grpo_loss(found.logprobs, None, advantages, found.mask)
    learner.backward(loss.gradients["logprobs"])
    norm = learner.step(lr=2e-4)
    print(f"step {step:3}  reward {rewards.mean():.3f}  loss {loss.value:8.5f}  gradient norm {norm:.4f}", flush=True)

learner.save_pretrained(arguments.adapter)
