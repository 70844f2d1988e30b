"""Four continuations of a prompt, the likeliest first: python examples/generate.py path/to/model "A prompt"."""

import sys

from transformers import AutoTokenizer

import whet

folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
sampling = whet.SamplingParams(temperature=0.8, max_new_tokens=64, stop_token_ids=[tokenizer.eos_token_id])
with whet.Engine.from_pretrained(folder, weights="bf16") as engine:
    [samples] = engine.generate([tokenizer(prompt)["input_ids"]], n=4, sampling=sampling)
for sample in sorted(samples, key=lambda sample: -sum(sample.logprobs)):
    print(f"{sum(sample.logprobs):8.2f}  {tokenizer.decode(sample.token_ids, skip_special_tokens=True)}")
