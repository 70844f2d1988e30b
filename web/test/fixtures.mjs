// Files that fixtures.py has written.
import { readFile } from "node:fs/promises";

export const FIXTURES = new URL("../build/web/fixtures/", `file://${process.cwd()}/`); // make runs the tests in web/

export async function readFixture(name) {
  return JSON.parse(await readFile(new URL(`${name}.json`, FIXTURES), "utf8"));
}

export const bits = (numbers) => [...new Uint32Array(Float32Array.from(numbers).buffer)];

/** All samples of a request, whole. */
export async function samplesOf(engine, prompt, options) {
  const samples = Array.from({ length: options.n ?? 1 }, () => ({ tokens: [], logprobs: [], text: "", top: null }));
  for await (const { sample, token, logprob, text, topLogprobs, finish } of engine.generate(prompt, options)) {
    samples[sample].tokens.push(token);
    samples[sample].logprobs.push(logprob);
    samples[sample].text += text;
    samples[sample].finish = finish;
    if (topLogprobs !== undefined) (samples[sample].top ??= []).push(topLogprobs.map((each) => [each.token, each.logprob]));
  }
  return samples;
}
