// The engine against the native one: the same seed and weights give the same tokens and bits of log-probs, on any
// number of threads, where the module fuses multiply and add; elsewhere the same but for rounding.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { Engine } from "../dist/index.js";
import { FIXTURES, readFixture } from "./fixtures.mjs";

const { cases } = await readFixture("model");
const bytesOf = async (name) => new Uint8Array(await readFile(new URL(`${name}.gguf`, FIXTURES)));
const bits = (numbers) => [...new Uint32Array(Float32Array.from(numbers).buffer)];
const isPlain = process.env.WHET_WEB_BUILD === "plain";

async function samplesOf(engine, prompt, sampling) {
  const samples = Array.from({ length: sampling.n ?? 1 }, () => ({ tokens: [], logprobs: [] }));
  for await (const { sample, token, logprob, finish } of engine.generate(prompt, sampling)) {
    samples[sample].tokens.push(token);
    samples[sample].logprobs.push(logprob);
    samples[sample].finish = finish;
  }
  return samples;
}

for (const name of Object.keys(cases).filter((each) => each !== "folder")) {
  test(`${name}: tokens and log-probs are those of the native engine`, async () => {
    const { ids, plain, greedy } = cases[name];
    for (const threads of isPlain ? [1] : [1, 2]) {
      const engine = await Engine.load(await bytesOf(name), { threads });
      try {
        const { exact, build } = await engine.info();
        assert.equal(build, isPlain ? "plain" : "threads");
        const sequence = [...ids, ...plain.samples[0].tokens];
        const scores = await engine.logprobs(sequence);
        const difference = scores.reduce((sum, score, i) => sum + Math.abs(score - plain.scores[i]), 0) / scores.length;
        assert.ok(difference < (name === "f32" ? 1e-5 : 0.1), `the mean difference of log-probs is ${difference}`);
        if (!exact) continue;
        assert.deepEqual(bits(scores), bits(plain.scores));
        const sampling = { n: 2, temperature: 0.8, topP: 0.9, maxNewTokens: 24, seed: 7, stopTokens: [1] };
        for (const [i, { tokens, logprobs }] of (await samplesOf(engine, ids, sampling)).entries()) {
          assert.deepEqual(tokens, plain.samples[i].tokens);
          assert.deepEqual(bits(logprobs), bits(plain.samples[i].logprobs));
        }
        const [{ tokens }] = await samplesOf(engine, ids, { temperature: 0, maxNewTokens: 16 });
        assert.deepEqual(tokens, greedy);
      } finally {
        engine.close();
      }
    }
  });
}

test("the module with threads is the one that is exact", async () => {
  const engine = await Engine.load(await bytesOf("q8_0"), { threads: 1 });
  assert.equal((await engine.info()).exact, !isPlain);
  engine.close();
});

test("a file that is cut is refused, and the next one loads", async () => {
  const bytes = await bytesOf("q8_0");
  await assert.rejects(Engine.load(bytes.subarray(0, bytes.length - 1000)), /Engine.load: bytes: /);
  await assert.rejects(Engine.load(bytes.subarray(0, 100)), /Engine.load: bytes: /);
  (await Engine.load(bytes, { threads: 1 })).close();
});
