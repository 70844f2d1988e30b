// Rows of a second embedding in memory for fewer rows than a request has: the least recently used are read again.
import assert from "node:assert/strict";
import { copyFile, readFile } from "node:fs/promises";
import { after, test } from "node:test";
import { Host } from "../../src/engine/host.ts";
import { listFiles } from "../../src/files/sources.ts";
import { FIXTURES } from "../fixtures.mjs";
import { mentions } from "../mentions.mjs";
import { serve } from "../server.mjs";

const NEXT_TO_SCRIPT = ["threads.wasm", "threads-plain.wasm", "plain.wasm", "learner.wasm", "learner.js", "hf.js"];
for (const name of NEXT_TO_SCRIPT) await copyFile(`dist/${name}`, new URL(`./${name}`, import.meta.url));
const server = await serve({ "vocabulary.gguf": await readFile(new URL("families/vocabulary.gguf", FIXTURES)) });
after(() => server.close());
const signal = new AbortController().signal;
const SAMPLING = {
  temperature: 2, topP: 1, minP: 0, topK: 0, repetitionPenalty: 1, presencePenalty: 0, frequencyPenalty: 0, logitBias: [], topLogprobs: 0,
  stop: [], stopTokenIds: [], minNewTokens: 0, maxNewTokens: 60,
};

const from = { where: "test", signal, onProgress: () => {} };
const load = (options, tableBytes) => Host.load(listFiles(server.url("vocabulary.gguf"), "test"), { threads: 1, maxBatch: 2, ...options }, true, from, () => {}, tableBytes);

async function run(tableBytes) {
  const host = await load({}, tableBytes);
  const begin = server.requests.length;
  const tokens = [];
  const generate = async (seed) => {
    const prompt = Int32Array.from({ length: 50 }, (_, i) => (i * 7 + seed * 31) % 400);
    const found = [];
    await host.generate({ prompt, options: {}, sampling: { ...SAMPLING, seed: BigInt(seed) }, usesModelStops: false, n: 1, promptIndex: 0, adapter: 0 }, signal, (drawn) => found.push(...drawn.map(({ token, logprob }) => [token, logprob])));
    tokens[seed] = found;
  };
  for (let seed = 0; seed < 6; seed += 2) await Promise.all([generate(seed), generate(seed + 1)]);
  return { tokens, nRows: server.requests.length - begin, weightsBytes: host.info().weightsBytes };
}

test("samples are the same with memory for the rows of one step, which takes fewer bytes and more reads", async () => {
  const whole = await run();
  const least = await run(1);
  const rows = (places) => places * (7 * 6 * 4 + 4); // numbers and index
  assert.deepEqual(least.tokens, whole.tokens);
  assert.equal(whole.weightsBytes - least.weightsBytes, rows(400) - rows(2 + 64));
  assert.ok(whole.nRows > 66 && whole.nRows <= 400, `${whole.nRows} rows`); // each once
  assert.ok(least.nRows > whole.nRows, `${least.nRows} and ${whole.nRows} rows`);
});

test("a learner's batch has at most as many different tokens as there is memory for", async () => {
  const host = await load({ learning: true }, 1);
  const learn = (action, given) => host.learn({ action, given, where: "Learner.logprobs" }, { ...from, where: "Learner.logprobs" });
  await learn("create", { rank: 2, alpha: 4, targets: [], seed: 0n });
  const row = (token) => ({ prompt: Int32Array.of(0), completion: Int32Array.of(token + 1) });
  const score = (n) => learn("logprobs", { rows: Array.from({ length: n - 1 }, (_, i) => row(i)), temperature: 1, adapters: true, keep: false });
  assert.equal((await score(66)).length, 65);
  await assert.rejects(score(67), mentions("WhetError: Learner.logprobs", 67, 66, "maxTokensPerStep"));
  assert.equal((await score(66)).length, 65);
});
