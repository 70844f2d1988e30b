// A second embedding (Gemma 4), which stays in its file: rows of the tokens of a step are read before it, and errors of reading
// leave the engine usable.
import assert from "node:assert/strict";
import { readdirSync } from "node:fs";
import { mkdtemp, readFile, truncate, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { after, before, test } from "node:test";
import { Engine } from "../dist/index.js";
import { FIXTURES, readFixture, samplesOf } from "./fixtures.mjs";
import { mentions } from "./mentions.mjs";
import { serve } from "./server.mjs";

const families = await readFixture("families");
const SAMPLING = { n: 2, temperature: 0.8, topP: 0.9, maxNewTokens: 16, seed: 3 };
const TABLE = "per_layer_token_embd.weight";
const ROW = 7 * 6 * 4; // bytes: layers, numbers, float32
const one = { threads: 1 };
const read = (name) => readFile(new URL(`families/${name}`, FIXTURES));
const file = await read("gemma4.gguf");
const { ids, samples, scores } = families.find((each) => each.file === "families/gemma4.gguf");
const embedded = new Set([...ids, ...samples.flatMap(({ tokens }) => tokens.slice(0, -1))]); // a last token is not an input
const PARTS = readdirSync(new URL("families/", FIXTURES)).filter((name) => name.startsWith("table-part"));
let server;
before(async () => {
  const files = { "gemma4.gguf": file };
  for (const name of PARTS) files[name] = await read(name);
  for (const name of ["config.json", "model.safetensors"]) files[`gemma4/${name}`] = await read(`gemma4/${name}`);
  server = await serve(files);
});
after(() => server.close());

async function assertWorks(engine, expected = { samples, scores }) {
  const found = await samplesOf(engine, ids, SAMPLING);
  assert.deepEqual(found.map(({ tokens, logprobs }) => ({ tokens, logprobs })), expected.samples);
  assert.deepEqual(Array.from(await engine.logprobs(ids)), expected.scores);
}

async function withEngine(source, use, options = {}) {
  const engine = await Engine.load(source, { ...one, ...options });
  try {
    return await use(engine);
  } finally {
    engine.close();
  }
}

/** Return the ranges [begin, end) requested since request `from`. */
const ranges = (from) => server.requests.slice(from).map(({ range }) => range?.match(/\d+/g).map(Number) ?? [0]).map(([begin, last]) => [begin, (last ?? NaN) + 1]);

/** Position of the table: its row r is `bytes` of numbers that no other tensor has. */
async function tableOf(bytes) {
  const begin = server.requests.length;
  await withEngine(server.url("gemma4.gguf"), (engine) => engine.logprobs([0, 1]));
  const [row] = ranges(begin).filter(([from, to]) => to - from === ROW);
  return { at: row[0], bytes };
}

for (const source of ["gemma4.gguf", "gemma4/"]) {
  test(`${source} of a server: only the rows of the tokens are requested, once each`, async () => {
    const expected = families.find((each) => each.file === `families/${source}` && each.adapter === undefined && each.options.weights === undefined);
    await withEngine(server.url(source), async (engine) => {
      const loaded = server.requests.length;
      await assertWorks(engine, expected);
      const rows = ranges(loaded);
      assert.deepEqual(new Set(rows.map(([from, to]) => to - from)), new Set([ROW]));
      const tokens = new Set([...ids, ...expected.samples.flatMap(({ tokens }) => tokens.slice(0, -1))]);
      assert.deepEqual([rows.length, new Set(rows.map(([from]) => from)).size], [tokens.size, tokens.size]);
      await assertWorks(engine, expected);
      assert.equal(server.requests.length - loaded, tokens.size);
    });
  });
}

test("a split file of a server, a path, a File and bytes give the same samples", async () => {
  assert.ok(PARTS.length > 1);
  const run = (source) => withEngine(source, async (engine) => [await samplesOf(engine, ids, SAMPLING), await engine.logprobs(ids)]);
  const parts = await run(PARTS.map((name) => new URL(`families/${name}`, FIXTURES)));
  const begin = server.requests.length;
  assert.deepEqual(await run(PARTS.map((name) => server.url(name))), parts);
  assert.ok(ranges(begin).some(([from, to]) => to - from === 7 * 32 * 4)); // rows by ranges
  for (const source of [new URL("families/gemma4.gguf", FIXTURES), new File([file], "gemma4.gguf"), file]) await withEngine(source, assertWorks);
});

test("concurrent requests, of which some are left, give the same samples as sequential ones", async () => {
  await withEngine(server.url("gemma4.gguf"), async (engine) => {
    const prompts = Array.from({ length: 6 }, (_, i) => ids.map((id) => (id + 7 * i) % 48));
    const run = (prompt, i) => samplesOf(engine, prompt, { ...SAMPLING, seed: i });
    const leave = async (prompt) => {
      for await (const _ of engine.generate(prompt, SAMPLING)) break;
    };
    const [scored, ...found] = await Promise.all([engine.logprobs(ids), ...prompts.map(run), ...prompts.map(leave)]);
    assert.deepEqual(Array.from(scored), scores);
    for (const [i, prompt] of prompts.entries()) assert.deepEqual(found[i], await run(prompt, i));
  });
});

test("an estimate has the memory of the loaded engine, except the padding of panels", async () => {
  for (const name of ["gemma4.gguf", "vocabulary.gguf"]) {
    const source = new URL(`families/${name}`, FIXTURES);
    const { weightsBytes, parameters } = await Engine.estimate(source);
    const info = await withEngine(source, (engine) => engine.info());
    assert.equal(parameters, info.parameters);
    assert.ok(Math.abs(weightsBytes / info.weightsBytes - 1) < 0.04, `${weightsBytes} and ${info.weightsBytes} bytes`); // the table is 6 %, or more
  }
});

test("a server without ranges is rejected, and one with a digest needs none", async () => {
  await assert.rejects(Engine.load(server.url("gemma4.gguf?whole"), one), mentions("Engine.load", "gemma4.gguf?whole", "answered 200", "bytes 0 to 0", "expected 206", "range requests"));
  const digest = Buffer.from(await crypto.subtle.digest("SHA-256", file)).toString("hex");
  await withEngine(server.url("gemma4.gguf?whole"), assertWorks, { sha256: digest });
});

test("a file that changes on its server is an error of the request, and works again once it is back", async () => {
  await withEngine(server.url("gemma4.gguf"), async (engine) => {
    server.etag = "2";
    const names = mentions("WhetError: Engine.generate", TABLE, `token ${ids[0]}`, server.url("gemma4.gguf"), "has changed", `${file.length} bytes`, '"2"', '"1"', "Load it again");
    await assert.rejects(samplesOf(engine, ids, SAMPLING), names);
    server.etag = "1";
    await assertWorks(engine);
  });
});

test("a network that fails in the middle of a sample is an error of the request after retries, and works again", async () => {
  await withEngine(server.url("gemma4.gguf"), async (engine) => {
    let n = 0;
    const run = async () => {
      for await (const _ of engine.generate(ids, SAMPLING)) if (++n === 2) server.isDown = true;
    };
    const begin = server.requests.length;
    await assert.rejects(run(), mentions("WhetError: Engine.generate", TABLE, "the row of token", server.url("gemma4.gguf"), "could not be requested", "network"));
    assert.ok(n >= 2 && n < 32, `${n} tokens`);
    const last = ranges(begin).at(-1)[0];
    assert.ok(ranges(begin).filter(([from]) => from === last).length >= 4); // attempts
    server.isDown = false;
    await assertWorks(engine);
    const controller = new AbortController();
    server.isDown = true;
    const others = Array.from({ length: 48 }, (_, i) => i).filter((id) => !embedded.has(id));
    const scoring = samplesOf(engine, others, { ...SAMPLING, signal: controller.signal });
    setTimeout(() => controller.abort(), 100);
    await assert.rejects(scoring, { name: "AbortError" });
    await new Promise((resolve) => setTimeout(resolve, 200)); // the abort reaches the worker
    const asked = server.requests.length;
    await new Promise((resolve) => setTimeout(resolve, 2000));
    assert.equal(server.requests.length, asked); // no further attempts
    server.isDown = false;
    await assertWorks(engine);
  });
});

test("a busy server is asked again", async () => {
  await withEngine(server.url("gemma4.gguf?busy=0"), assertWorks);
});

test("a local file that is truncated or changed is an error of the request", async () => {
  const path = `${await mkdtemp(`${tmpdir()}/whet-`)}/gemma4.gguf`;
  await writeFile(path, file);
  await withEngine(path, async (engine) => {
    await truncate(path, 4096);
    const first = await engine.logprobs(ids).catch((error) => error);
    mentions("WhetError: Engine.logprobs", TABLE, "the row of token", path, "ends at byte", "expected", "load it again")(first);
    await writeFile(path, file);
    await assert.rejects(samplesOf(engine, ids, SAMPLING), mentions("WhetError: Engine.generate", TABLE, "the row of token", path, "was changed", "bytes", "Load it again"));
    assert.equal((await engine.info()).architecture, "gemma4");
  });
});

test("a row with NaN or infinity is an error of the requests with its token", async () => {
  const { at, bytes } = await tableOf(Buffer.from(file));
  const token = [...Array(48).keys()].find((id) => id > 1 && !embedded.has(id));
  bytes.writeFloatLE(NaN, at + token * ROW + 8);
  await withEngine(bytes, async (engine) => {
    await assert.rejects(engine.logprobs([0, token, 2]), mentions("WhetError: Engine.logprobs", TABLE, `token ${token}`, "NaN or infinity"));
    await assertWorks(engine);
  });
});

test("sizes of layers that contradict each other are rejected", async () => {
  const names = ["config.json", "model.safetensors"];
  const files = Object.fromEntries(await Promise.all(names.map(async (name) => [name, await read(`gemma4/${name}`)])));
  const config = JSON.parse(files["config.json"]);
  const wrong = (changes, ...facts) => {
    const changed = Buffer.from(JSON.stringify({ ...config, ...changes }));
    return assert.rejects(Engine.load({ files: { ...files, "config.json": changed } }, one), mentions("WhetError: Engine.load", ...facts));
  };
  const [[layer, sizes], ...others] = Object.entries(config.per_layer_config);
  await wrong({ per_layer_config: Object.fromEntries(others) }, "per_layer_config", "full_attention");
  await wrong({ per_layer_config: { ...config.per_layer_config, [layer]: { ...sizes, head_dim: 16 } } }, "per_layer_config", 16, "one head_dim");
  await wrong({ layer_types: config.layer_types.with(-1, "sliding_attention"), per_layer_config: null, global_head_dim: 12 }, "layer_types", "last layer");
  await wrong({ vocab_size_per_layer_input: 40 }, "vocab_size_per_layer_input", 40, "vocab_size=48");
  await wrong({ num_kv_shared_layers: 7 }, "num_kv_shared_layers", 7, "num_hidden_layers=7");
  await wrong({ hidden_size_per_layer_input: -1 }, "hidden_size_per_layer_input", -1, "at least 0");
  await wrong({ hidden_size_per_layer_input: 8 }, "embed_tokens_per_layer.weight", "(48, 42)", "(48, 56)");
  await wrong({ attention_k_eq_v: true }, "attention_k_eq_v", true, "gemma4_text");
  // In a GGUF file, numbers of the header are changed in place: after the key, its type.
  const patch = (key, write, ...facts) => {
    const bytes = Buffer.from(file);
    write(bytes, bytes.indexOf(key) + key.length + 4);
    return assert.rejects(Engine.load(bytes, one), mentions("WhetError: Engine.load", ...facts));
  };
  await patch("gemma4.attention.key_length_swa", (bytes, at) => bytes.writeUInt32LE(10, at), "value_length_swa", 8, "key_length_swa=10");
  await patch("gemma4.rope.dimension_count_swa", (bytes, at) => bytes.writeUInt32LE(4, at), "dimension_count_swa", 4, "key_length_swa=8");
  await patch("gemma4.feed_forward_length", (bytes, at) => bytes.writeInt32LE(7, at + 12), "feed_forward_length", "one width"); // after the items' type and number
  await patch("gemma4.attention.sliding_window_pattern", (bytes, at) => bytes.writeUInt8(1, at + 12 + 6), "sliding_window_pattern", "last layer");
});

test("actions of a learner and steps of the engine follow one another", async () => {
  const [prompt, completion] = [ids.slice(0, 3), ids.slice(3)];
  await withEngine(file, async (engine) => {
    const expectedScores = [...(await engine.logprobs(ids))];
    const learner = await engine.learner({ rank: 2 });
    const row = { prompt, completion };
    const [expected] = await learner.logprobs([row]);
    for (let i = 0; i < 3; ++i) {
      const [[found], scores] = await Promise.all([learner.logprobs([row]), engine.logprobs(ids), engine.logprobs(ids)]);
      assert.deepEqual([found, [...scores]], [expected, expectedScores]);
      await Promise.all([learner.backward([completion.map(() => 1)]), learner.sync(), engine.logprobs(ids)]);
    }
    await Promise.all([learner.close(), assert.rejects(learner.logprobs([{ prompt, completion }]), mentions("closed"))]);
  }, { threads: 2, learning: true });
});

test("closed engines close their files", async () => {
  const nOpen = () => readdirSync("/proc/self/fd").length;
  const load = (n) => Promise.all(Array.from({ length: n }, () => withEngine(new URL("families/gemma4.gguf", FIXTURES), (engine) => engine.logprobs(ids))));
  await load(1);
  const begin = nOpen();
  for (let i = 0; i < 4; ++i) await load(4);
  for (let i = 0; i < 100 && nOpen() > begin + 4; ++i) await new Promise((resolve) => setTimeout(resolve, 50));
  assert.ok(nOpen() <= begin + 4, `${nOpen()} files, before ${begin}`);
});
