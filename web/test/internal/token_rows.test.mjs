// Rows of a second embedding in memory for fewer rows than a request has: the least recently used are read again.
import assert from "node:assert/strict";
import { copyFile, readFile } from "node:fs/promises";
import { after, test } from "node:test";
import { Host } from "../../src/engine/host.ts";
import { listFiles } from "../../src/files/sources.ts";
import { FIXTURES } from "../fixtures.mjs";
import { serve } from "../server.mjs";

for (const name of ["threads", "threads-plain", "plain"]) await copyFile(`dist/${name}.wasm`, new URL(`./${name}.wasm`, import.meta.url)); // next to this script
const server = await serve({ "vocabulary.gguf": await readFile(new URL("families/vocabulary.gguf", FIXTURES)) });
after(() => server.close());
const signal = new AbortController().signal;
const SAMPLING = {
  temperature: 2, topP: 1, minP: 0, topK: 0, repetitionPenalty: 1, presencePenalty: 0, frequencyPenalty: 0, logitBias: [], topLogprobs: 0,
  stop: [], stopTokenIds: [], minNewTokens: 0, maxNewTokens: 60,
};

async function run(tableBytes) {
  const host = await Host.load(listFiles(server.url("vocabulary.gguf"), "test"), { threads: 1, maxBatch: 2 }, true, { where: "test", signal, onProgress: () => {} }, () => {}, tableBytes);
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
