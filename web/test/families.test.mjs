// Models of every supported family as folders and GGUF files, and in other formats: bit-identical to the native engine.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Engine } from "../dist/index.js";
import { FIXTURES, readFixture, samplesOf } from "./fixtures.mjs";

for (const { file, options, ids, samples, scores, adapter: folder } of await readFixture("families")) {
  test(`${file} ${options.weights ?? ""}${folder ?? ""}: tokens and log-probs equal the native engine's`, async () => {
    const engine = await Engine.load(new URL(file, FIXTURES), { threads: 1, ...options });
    try {
      const parts = ["adapter_config.json", "adapter_model.safetensors"].map((name) => new URL(`${folder}${name}`, FIXTURES));
      const adapter = folder === undefined ? 0 : await engine.loadAdapter(parts);
      const found = await samplesOf(engine, ids, { adapter, n: 2, temperature: 0.8, topP: 0.9, maxNewTokens: 16, seed: 3 });
      assert.deepEqual(found.map(({ tokens, logprobs }) => ({ tokens, logprobs })), samples);
      assert.deepEqual(Array.from(await engine.logprobs(ids, { adapter })), scores);
    } finally {
      engine.close();
    }
  });
}
