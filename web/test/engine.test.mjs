// The engine against the native one: tokens and log-probs are bit-identical on any number of threads if the module has a
// fused multiply-add; otherwise they differ by rounding.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { Engine } from "../dist/index.js";
import { bits, FIXTURES, readFixture, samplesOf } from "./fixtures.mjs";

const { prompt, messages, cases, samplings } = await readFixture("model");
const expectedBuild = process.env.WHET_WEB_BUILD ?? "threads";
const isExact = expectedBuild === "threads";
const SAMPLING = { n: 2, temperature: 0.8, topP: 0.9, maxNewTokens: 24, seed: 7 };

async function compare(engine, expected, adapter, exact) {
  const { ids, samples, scores: wanted } = expected;
  const scores = await engine.logprobs([...ids, ...samples[0].tokens], { adapter });
  const difference = scores.reduce((sum, score, i) => sum + Math.abs(score - wanted[i]), 0) / scores.length;
  // Log-probs are about 5 nats, weights are large and activations are rounded to 8 bits, which amplifies rounding errors.
  assert.ok(difference < 0.2, `the mean difference of log-probs is ${difference}`);
  if (!exact) return;
  assert.deepEqual(bits(scores), bits(wanted));
  for (const [i, { tokens, logprobs, text, finish }] of (await samplesOf(engine, prompt, { ...SAMPLING, adapter })).entries()) {
    assert.deepEqual(tokens, samples[i].tokens);
    assert.deepEqual(bits(logprobs), bits(samples[i].logprobs));
    assert.equal(text, samples[i].text);
    assert.equal(finish, samples[i].finish);
  }
}

for (const [name, { ids, plain, adapted, greedy, chat }] of Object.entries(cases)) {
  test(`${name}: tokens, texts and log-probs equal the native engine's, with and without an adapter`, async () => {
    for (const threads of expectedBuild === "plain" ? [1] : [1, 2]) {
      const engine = await Engine.load(new URL(name === "folder" ? "folder/" : `${name}.gguf`, FIXTURES), { threads });
      try {
        const info = await engine.info();
        const { exact } = info;
        assert.deepEqual([info.build, info.threads, exact], [expectedBuild, threads, isExact]);
        assert.deepEqual(await engine.tokenize(prompt), ids);
        const number = await engine.loadAdapter(["adapter_config.json", "adapter_model.safetensors"].map((file) => new URL(`adapter/${file}`, FIXTURES)));
        await compare(engine, { ids, ...adapted }, number, exact);
        await compare(engine, { ids, ...plain }, 0, exact);
        await engine.removeAdapter(number);
        if (exact) assert.deepEqual((await samplesOf(engine, ids, { temperature: 0, maxNewTokens: 16 }))[0].tokens, greedy);
        assert.deepEqual(await engine.tokenize(await engine.render(messages), { addSpecialTokens: false }), chat);
      } finally {
        engine.close();
      }
    }
  });
}

for (const { options, samples } of isExact ? samplings : []) {
  test(`sampling settings ${JSON.stringify(options)}: tokens, texts, log-probs and alternatives equal the native engine's`, async () => {
    const engine = await Engine.load(new URL("q8_0.gguf", FIXTURES), { threads: 1 });
    try {
      const found = await samplesOf(engine, cases.q8_0.ids, { ...options, seed: BigInt(options.seed), n: 2 });
      assert.deepEqual(found, samples);
    } finally {
      engine.close();
    }
  });
}
