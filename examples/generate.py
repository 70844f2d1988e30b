"""Sample four continuations of a prompt, most probable first: python examples/generate.py MODEL "A prompt"

MODEL is a Hugging Face folder or a .gguf file.
"""

import sys

import whet
from whet.models.tokenizers import load_tokenizer

path, prompt = sys.argv[1:]
tokenizer = load_tokenizer(path)
sampling = whet.SamplingParams(temperature=0.8, max_new_tokens=64, stop_token_ids=[tokenizer.eos_token_id])
with whet.Engine.from_pretrained(path) as engine:
    [samples] = engine.generate([tokenizer(prompt)["input_ids"]], n=4, sampling=sampling)
for sample in sorted(samples, key=lambda sample: -sum(sample.logprobs)):
    print(f"{sum(sample.logprobs):8.2f}  {tokenizer.decode(sample.token_ids, skip_special_tokens=True)}")
