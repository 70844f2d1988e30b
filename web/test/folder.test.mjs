// Hugging Face folders by URL, path and files; missing, contradictory and mismatched files.
import assert from "node:assert/strict";
import { readdir, readFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { Engine } from "../dist/index.js";
import { FIXTURES, readFixture, samplesOf } from "./fixtures.mjs";
import { mentions } from "./mentions.mjs";
import { serve } from "./server.mjs";

const { prompt, cases } = await readFixture("model");
const GREEDY = { temperature: 0, maxNewTokens: 16 };
const read = async (folder) => {
  const names = await readdir(new URL(folder, FIXTURES));
  return Object.fromEntries(await Promise.all(names.map(async (name) => [name, await readFile(new URL(`${folder}${name}`, FIXTURES))])));
};
const whole = await read("folder/");
const sharded = await read("families/sharded/");
const json = (value) => Buffer.from(JSON.stringify(value));
let server;
before(async () => {
  const files = {};
  for (const [folder, all] of [["whole", whole], ["sharded", sharded]]) for (const [name, bytes] of Object.entries(all)) files[`${folder}/${name}`] = bytes;
  server = await serve(files);
});
after(() => server.close());

test("a folder loads by URL, by path, and from its files in any order", async () => {
  const files = Object.entries(whole).map(([name, bytes]) => new File([bytes], name));
  const path = fileURLToPath(new URL("folder", FIXTURES));
  for (const source of [server.url("whole/"), path, `${path}/`, { files: whole }, files, files.toReversed()]) {
    const engine = await Engine.load(source, { threads: 1 });
    assert.deepEqual((await samplesOf(engine, cases.folder.ids, GREEDY))[0].tokens, cases.folder.greedy);
    assert.deepEqual(await engine.tokenize(prompt), cases.folder.ids);
    const { architecture, hasChatTemplate } = await engine.info();
    assert.deepEqual([architecture, hasChatTemplate], ["llama", true]);
    engine.close();
  }
});

test("shards load from a server, and an estimate downloads only headers", async () => {
  const engine = await Engine.load(server.url("sharded/"), { threads: 1, weights: "q8_0" });
  const info = await engine.info();
  engine.close();
  const begin = server.requests.length;
  const estimate = await Engine.estimate(server.url("sharded/"), { weights: "q8_0" });
  assert.ok(server.requests.slice(begin).every(({ range }) => range !== undefined));
  assert.deepEqual([estimate.parameters, estimate.formats, estimate.contextLength], [info.parameters, info.formats, info.contextLength]);
  const size = Object.entries(sharded).reduce((sum, [name, bytes]) => sum + (name.endsWith(".safetensors") ? bytes.length : 0), 0);
  assert.equal(estimate.fileBytes, size);
});

test("sampling ends with the stop tokens of the generation config and the tokenizer", async () => {
  const [stop] = cases.folder.greedy;
  const files = { ...whole, "generation_config.json": json({ eos_token_id: [stop] }) };
  const engine = await Engine.load({ files }, { threads: 1 });
  const [{ tokens, finish }] = await samplesOf(engine, prompt, GREEDY);
  engine.close();
  assert.deepEqual([tokens, finish], [[stop], "stop"]);
});

test("weights that their format cannot represent are rejected", async () => {
  const given = whole["model.safetensors"];
  const headerBytes = Number(given.readBigUInt64LE());
  const name = "model.layers.1.mlp.down_proj.weight";
  const { dtype, data_offsets: [begin, end] } = JSON.parse(given.subarray(8, 8 + headerBytes))[name];
  assert.equal(dtype, "F32");
  const load = (value, weights) => {
    const bytes = Buffer.from(given);
    for (let at = begin; at < end; at += 4) bytes.writeFloatLE(value, 8 + headerBytes + at);
    return Engine.load({ files: { ...whole, "model.safetensors": bytes } }, { threads: 1, weights }).then((engine) => engine.close());
  };
  await assert.rejects(load(1e38, "q8_0"), mentions("Engine.load", name, "1.000e+38", "q8_0", "bf16"));
  await assert.rejects(load(-1e-9, "q8_0"), mentions("Engine.load", name, "100%", "q8_0", "1.000e-9"));
  await assert.rejects(load(3.4028234e38, "bf16"), mentions("Engine.load", name, "3.403e+38", "bf16", "float32"));
  for (const [value, weights] of [[1e38, "bf16"], [1e-9, "int8"], [3.4028234e38, "float32"]]) await load(value, weights);
  for (const value of [NaN, -Infinity]) await assert.rejects(load(value), mentions("Engine.load", name, "NaN or infinity"));
});

test("missing, contradictory and mismatched files are rejected", async () => {
  const config = JSON.parse(whole["config.json"]);
  const without = (files, ...names) => Object.fromEntries(Object.entries(files).filter(([name]) => !names.includes(name)));
  const load = (files) => Engine.load({ files }, { threads: 1 }).then((engine) => engine.close());
  const shard = Object.keys(sharded).find((name) => name.includes("00001-of"));
  const index = JSON.parse(sharded["model.safetensors.index.json"]);
  const [first] = Object.keys(index.weight_map);
  const wrong = async (files, ...facts) => assert.rejects(load(files), mentions("WhetError: Engine.load", ...facts));
  await wrong(without(whole, "model.safetensors"), "model.safetensors", "model.safetensors.index.json");
  await wrong(without(sharded, shard), shard, "model.safetensors.index.json");
  await wrong({ ...sharded, "model.safetensors.index.json": json({ weight_map: { ...index.weight_map, [first]: "../a.safetensors" } }) }, "weight_map", first, "../a.safetensors");
  await wrong({ ...sharded, "model.safetensors.index.json": json({ weight_map: { ...index.weight_map, more: shard } }) }, shard, "lacks more", "model.safetensors.index.json");
  await wrong({ ...whole, "config.json": json({ ...config, model_type: "gemma3n" }) }, "model_type", "gemma3n", "several residual streams", "gemma2, gemma3_text, gemma4_text, gpt2");
  await wrong({ ...whole, "config.json": json({ ...config, num_hidden_layers: 3 }) }, "model.layers.2.input_layernorm.weight", "missing", "config.json");
  await wrong({ ...whole, "config.json": json({ ...config, num_hidden_layers: 1 }) }, "model.layers.1.input_layernorm.weight", "llama", "config.json");
  await wrong({ ...whole, "config.json": json({ ...config, intermediate_size: 128 }) }, "mlp.gate_proj.weight", "(256, 256)", "(128, 256)");
  await wrong({ ...whole, "config.json": json({ ...config, quantization_config: {} }) }, "quantization_config", "{}", "llama", "null");
  await wrong({ ...whole, "config.json": json({ ...config, rope_parameters: { rope_type: "linear", rope_theta: 1e4, fctor: 2 } }) }, "rotary embedding", "factor", "undefined", "above 0");
  await wrong({ ...whole, "config.json": Buffer.from("{") }, "config.json", "JSON");
  await wrong({ ...whole, "model.safetensors": whole["model.safetensors"].subarray(0, 1000) }, "model.safetensors", "damaged");
  await assert.rejects(Engine.load(server.url("nowhere/")), mentions("nowhere/", "config.json", "GGUF"));
  await assert.rejects(Engine.load(server.url("whole/"), { sha256: "0".repeat(64) }), mentions("sha256", "folder", "object"));
  await assert.rejects(Engine.load(server.url("whole/"), { weights: "q9" }), mentions("weights", "q9", "float32, bf16, int8, q8_0"));
  await assert.rejects(Engine.load(server.url("whole/"), { weights: 8 }), mentions("weights", 8, "q8_0"));
  const bare = await Engine.load({ files: without(whole, "tokenizer.json") }, { threads: 1 });
  await assert.rejects(bare.tokenize("a"), mentions("Engine.tokenize", "tokenizer.json", "token ids"));
  assert.deepEqual((await samplesOf(bare, cases.folder.ids, GREEDY))[0].tokens, cases.folder.greedy);
  bare.close();
});
