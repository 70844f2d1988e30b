// A Hugging Face folder by URL, path and files; what is missing, contradictory or another model's.
import assert from "node:assert/strict";
import { readdir, readFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { Engine } from "../dist/index.js";
import { FIXTURES, readFixture, samplesOf } from "./fixtures.mjs";
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

test("a folder is loaded by its URL, its path, and its files in any order", async () => {
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

test("shards come from a server too, and an estimate asks for heads alone", async () => {
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

test("the sampling ends with the stop tokens of the generation config and the tokenizer", async () => {
  const [stop] = cases.folder.greedy;
  const files = { ...whole, "generation_config.json": json({ eos_token_id: [stop] }) };
  const engine = await Engine.load({ files }, { threads: 1 });
  const [{ tokens, finish }] = await samplesOf(engine, prompt, GREEDY);
  engine.close();
  assert.deepEqual([tokens, finish], [[stop], "stop"]);
});

test("files that are missing, contradictory or another model's are told", async () => {
  const config = JSON.parse(whole["config.json"]);
  const without = (files, ...names) => Object.fromEntries(Object.entries(files).filter(([name]) => !names.includes(name)));
  const load = (files) => Engine.load({ files }, { threads: 1 }).then((engine) => engine.close());
  const shard = Object.keys(sharded).find((name) => name.includes("00001-of"));
  const index = JSON.parse(sharded["model.safetensors.index.json"]);
  const [first] = Object.keys(index.weight_map);
  const wrong = async (files, message) => assert.rejects(load(files), message);
  await wrong(without(whole, "model.safetensors"), /folder has neither model.safetensors nor model.safetensors.index.json. Save the model as safetensors/);
  await wrong(without(sharded, shard), /folder has no model-00001-of-\d+.safetensors, which model.safetensors.index.json names/);
  await wrong({ ...sharded, "model.safetensors.index.json": json({ weight_map: { ...index.weight_map, [first]: "../a.safetensors" } }) }, /has weight_map \[".*","..\/a.safetensors"\], expected tensor names/);
  await wrong({ ...sharded, "model.safetensors.index.json": json({ weight_map: { ...index.weight_map, more: shard } }) }, /does not hold more, as model.safetensors.index.json says/);
  await wrong({ ...whole, "config.json": json({ ...config, model_type: "gemma3n" }) }, /model_type is "gemma3n", which has inputs of each layer, and other attention; this engine runs gemma2, gemma3_text, gpt2/);
  await wrong({ ...whole, "config.json": json({ ...config, num_hidden_layers: 3 }) }, /there is no tensor model.layers.2.input_layernorm.weight, which the config asks for/);
  await wrong({ ...whole, "config.json": json({ ...config, num_hidden_layers: 1 }) }, /a llama with this config has no model.layers.1.input_layernorm.weight/);
  await wrong({ ...whole, "config.json": json({ ...config, intermediate_size: 128 }) }, /mlp.gate_proj.weight has shape \(256, 256\), expected \(128, 256\)/);
  await wrong({ ...whole, "config.json": json({ ...config, quantization_config: {} }) }, /quantization_config is \{\}, which the engine does not run for llama; expected null/);
  await wrong({ ...whole, "config.json": json({ ...config, rope_parameters: { rope_type: "linear", rope_theta: 1e4, fctor: 2 } }) }, /rotary embedding: factor is undefined, expected a number above 0/);
  await wrong({ ...whole, "config.json": Buffer.from("{") }, /config.json is not JSON/);
  await wrong({ ...whole, "model.safetensors": whole["model.safetensors"].subarray(0, 1000) }, /is no safetensors file, or damaged/);
  await assert.rejects(Engine.load(server.url("nowhere/")), /nowhere\/ has no config.json. Give a Hugging Face folder, or a GGUF file/);
  await assert.rejects(Engine.load(server.url("whole/"), { sha256: "0".repeat(64) }), /sha256 is one text, and the source is a folder/);
  await assert.rejects(Engine.load(server.url("whole/"), { weights: "q9" }), /weights is "q9", expected one of float32, bf16, int8, q8_0, or none/);
  await assert.rejects(Engine.load(server.url("whole/"), { weights: 8 }), /weights is 8, expected the name of a format/);
  const bare = await Engine.load({ files: without(whole, "tokenizer.json") }, { threads: 1 });
  await assert.rejects(bare.tokenize("a"), /the folder has no tokenizer.json. Give prompts as token ids/);
  assert.deepEqual((await samplesOf(bare, cases.folder.ids, GREEDY))[0].tokens, cases.folder.greedy);
  bare.close();
});
