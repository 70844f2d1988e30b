// The Engine's API: prompts of every kind, concurrent requests, cancellation, and invalid arguments.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { Engine } from "../dist/index.js";
import { FIXTURES, readFixture, samplesOf } from "./fixtures.mjs";
import { mentions } from "./mentions.mjs";
import { serve } from "./server.mjs";

const { prompt, messages, cases } = await readFixture("model");
const { ids, chat: chatIds, greedy } = cases.q8_0;
const bytes = await readFile(new URL("q8_0.gguf", FIXTURES));
const part = (i) => new URL(`part-0000${i}-of-00003.gguf`, FIXTURES);
let engine;
let server;
before(async () => {
  engine = await Engine.load(bytes, { threads: 1 });
  server = await serve({ "q8_0.gguf": bytes, "a.txt": Buffer.from("not a model") });
});
after(async () => {
  engine.close();
  await server.close();
});

const take = async (tokens, n = Infinity) => {
  const found = [];
  for await (const token of tokens) if (found.push(token) >= n) break;
  return found;
};
const GREEDY = { temperature: 0, maxNewTokens: 8, stopTokenIds: [] };

test("text, messages and token ids give the same tokens", async () => {
  const tokensOf = async (given, options) => (await samplesOf(engine, given, { ...GREEDY, ...options }))[0].tokens;
  assert.deepEqual((await tokensOf(ids)).slice(0, 8), greedy.slice(0, 8));
  const stops = [1];
  assert.deepEqual(await tokensOf(prompt), await tokensOf(ids, { stopTokenIds: stops }));
  assert.deepEqual(await tokensOf(messages), await tokensOf(chatIds, { stopTokenIds: stops }));
  assert.deepEqual(await tokensOf(Uint16Array.from(ids)), await tokensOf(ids));
});

test("chat.messages keeps replies, including interrupted ones", async () => {
  const chat = engine.chat({ system: "Be brief.", ...GREEDY });
  const reply = (await take(chat.send("a"))).map(({ text }) => text).join("");
  await take(chat.send("b"), 2);
  assert.deepEqual(chat.messages.map(({ role }) => role), ["system", "user", "assistant", "user", "assistant"]);
  assert.equal(chat.messages[2].content, reply);
});

test("a second send during a reply is rejected", async () => {
  const chat = engine.chat(GREEDY);
  const first = take(chat.send("one"));
  await assert.rejects(take(chat.send("two")), mentions("WhetError: Chat.send", "another reply"));
  await first;
  await take(chat.send("two"), 1); // left
  await take(chat.send("three"));
  assert.deepEqual(chat.messages.filter(({ role }) => role === "user").map(({ content }) => content), ["one", "two", "three"]);
});

test("every reply has its own seed, as in whet chat", async () => {
  const options = { temperature: 1, maxNewTokens: 12, seed: 2n ** 64n - 1n };
  const tokensOf = async (tokens) => (await take(tokens)).map(({ token }) => token);
  const chat = engine.chat(options);
  for (const [content, seed] of [["a", options.seed], ["b", 0], ["c", 1]]) {
    const asked = [...chat.messages, { role: "user", content }];
    assert.deepEqual(await tokensOf(chat.send(content)), await tokensOf(engine.generate(asked, { ...options, seed })));
  }
  const asked = [...chat.messages, { role: "user", content: "d" }];
  assert.deepEqual(await tokensOf(chat.send("d", { seed: 9 })), await tokensOf(engine.generate(asked, { ...options, seed: 9 })));
  await assert.rejects(take(engine.chat({ seed: -1 }).send("a")), mentions("seed", -1, "2^64 - 1"));
});

test("a full context drops the oldest turns but not the system message", async () => {
  for (const small of [{ contextLength: 128 }, { kvBytes: (await engine.info()).kvBytes / 4 }]) {
    const short = await Engine.load(bytes, { threads: 1, ...small });
    const chat = short.chat({ ...GREEDY, system: "s", minNewTokens: 8 });
    const { context } = await short.measure([{ role: "user", content: "" }], {});
    for (let turn = 0; turn < 30; ++turn) await take(chat.send(`t${turn}`));
    const { tokens } = await short.measure(chat.messages, {});
    assert.ok(tokens <= context, `${tokens} of ${context}`);
    assert.deepEqual(chat.messages.slice(0, 2).map(({ role }) => role), ["system", "user"]);
    assert.ok(chat.messages.length < 61 && chat.messages.at(-2).content === "t29");
    const before = [...chat.messages];
    await assert.rejects(take(chat.send("long ".repeat(context))), mentions("WhetError: Chat.send", "content", context, "contextLength"));
    assert.deepEqual(chat.messages, before);
    short.close();
  }
});

test("concurrent requests give the same samples as sequential ones", async () => {
  const options = { temperature: 1, maxNewTokens: 20, seed: 3, n: 3 };
  const single = await samplesOf(engine, ids, options);
  const both = await Promise.all([samplesOf(engine, ids, options), samplesOf(engine, ids, options), samplesOf(engine, chatIds, options)]);
  assert.deepEqual(both.slice(0, 2), [single, single]);
});

test("an AbortSignal or leaving the loop ends a request between two tokens", async () => {
  const controller = new AbortController();
  const found = [];
  await assert.rejects(
    (async () => {
      for await (const token of engine.generate(ids, { maxNewTokens: 400, signal: controller.signal })) {
        if (found.push(token) === 3) controller.abort();
      }
    })(),
    { name: "AbortError" },
  );
  assert.equal(found.length, 3);
  await take(engine.generate(ids, { maxNewTokens: 400 }), 2);
  await assert.rejects(engine.logprobs(ids, { signal: AbortSignal.abort() }), { name: "AbortError" });
  assert.equal((await take(engine.generate(ids, GREEDY))).length, 8); // the engine still works
});

test("engines are independent", async () => {
  const other = await Engine.load(new URL("f32.gguf", FIXTURES), { threads: 1 });
  const [mine, its] = await Promise.all([samplesOf(engine, ids, GREEDY), samplesOf(other, ids, GREEDY)]);
  assert.deepEqual(mine[0].tokens, greedy.slice(0, 8));
  assert.deepEqual(its[0].tokens, cases.f32.greedy.slice(0, 8));
  other.close();
});

test("a split GGUF file loads from its parts in any order", async () => {
  const paths = [part(2), part(1), part(3)];
  const files = await Promise.all(paths.map(async (path) => new File([await readFile(path)], path.pathname.split("/").pop())));
  for (const source of [paths, files]) {
    const split = await Engine.load(source, { threads: 1 });
    assert.deepEqual((await samplesOf(split, ids, GREEDY))[0].tokens, cases.f32.greedy.slice(0, 8));
    split.close();
  }
  await assert.rejects(Engine.load([part(1), part(3)]), mentions("source", 2, 3, "part 2"));
  await assert.rejects(Engine.load(part(1)), mentions("part-00001-of-00003.gguf", 3, 1, "all parts"));
  await assert.rejects(Engine.load([bytes, bytes]), mentions("source", 2, "-00001-of-0000N.gguf"));
});

test("a URL loads with progress, and an estimate downloads only its header", async () => {
  const progress = [];
  const loaded = await Engine.load(server.url("q8_0.gguf"), { threads: 1, onProgress: (each) => progress.push(each) });
  assert.deepEqual(new Set(progress.map(({ phase }) => phase)), new Set(["download", "pack"]));
  const info = await loaded.info();
  loaded.close();
  const before = server.requests.length;
  const estimate = await Engine.estimate(server.url("q8_0.gguf"));
  assert.ok(server.requests.slice(before).every(({ range }) => range !== undefined));
  assert.equal(estimate.fileBytes, bytes.length);
  assert.deepEqual([estimate.parameters, estimate.formats, estimate.contextLength], [info.parameters, info.formats, info.contextLength]);
  assert.ok(Math.abs(estimate.weightsBytes / info.weightsBytes - 1) < 0.1, `${estimate.weightsBytes}, ${info.weightsBytes}`);
  await assert.rejects(Engine.load(server.url("a.txt")), mentions("Engine.load", "a.txt"));
  await assert.rejects(Engine.estimate(server.url("b.gguf")), mentions("b.gguf", 404));
});

test("an interrupted download is resumed, and an AbortSignal cancels a load", async () => {
  const cut = await Engine.load(server.url("q8_0.gguf?cut=200000"), { threads: 1 });
  assert.deepEqual((await samplesOf(cut, ids, GREEDY))[0].tokens, greedy.slice(0, 8));
  cut.close();
  const controller = new AbortController();
  const loading = Engine.load(server.url("q8_0.gguf?cut=1000&always"), { signal: controller.signal });
  setTimeout(() => controller.abort(), 200);
  await assert.rejects(loading, { name: "AbortError" });
});

test("a damaged file is rejected, and the next one loads", async () => {
  await assert.rejects(Engine.load(bytes.subarray(0, bytes.length - 1000)), mentions("WhetError: Engine.load", "bytes"));
  await assert.rejects(Engine.load(bytes.subarray(0, 100)), mentions("WhetError: Engine.load", "bytes"));
  await assert.rejects(Engine.load(new Uint8Array(0)), mentions("WhetError: Engine.load", "bytes"));
  const noise = Uint8Array.from(bytes, (byte, i) => (i > 200 && i < 3000 ? byte ^ 0xa5 : byte));
  await assert.rejects(Engine.load(noise), mentions("WhetError: Engine.load", "bytes"));
  (await Engine.load(bytes, { threads: 1 })).close();
});

test("invalid arguments are rejected with their name, value and range", async () => {
  const wrong = (run, check) => assert.rejects(async () => run(), check);
  const { vocabSize } = await engine.info();
  await wrong(() => Engine.load(), mentions("Engine.load", "source", undefined, "URL"));
  await wrong(() => Engine.load(bytes, { threads: 0 }), mentions("Engine.load", "threads", 0, 1, 128));
  await wrong(() => Engine.load(bytes, { thread: 2 }), mentions("option thread.", "threads, contextLength"));
  await wrong(() => Engine.load(bytes, { signal: 1 }), mentions("signal", 1, "AbortSignal"));
  await wrong(() => Engine.load(bytes, { onProgress: 1 }), mentions("onProgress", 1, "function"));
  await wrong(() => Engine.load(bytes, { threads: 1000 }), mentions("threads", 1000, 1, 128));
  await wrong(() => Engine.load(bytes, { contextLength: 2 ** 33 }), mentions("contextLength", 2 ** 33, 1, 2 ** 31 - 1));
  await wrong(() => Engine.load(bytes, { kvBytes: 1 }), mentions("kvBytes", 1, "at least", "page"));
  for (const sha256 of ["xyz", 7, { "model.gguf": "xyz" }]) await wrong(() => Engine.load(server.url("none"), { sha256 }), mentions("sha256", sha256 === 7 ? 7 : "xyz", 64));
  await wrong(() => Engine.load(bytes, { sha256: "0".repeat(64) }), mentions("bytes", "sha256", "0".repeat(64)));
  const generate = (...args) => () => take(engine.generate(...args));
  await wrong(generate(), mentions("Engine.generate", "prompt", undefined, "token id"));
  await wrong(generate(""), mentions("prompt", "no tokens"));
  await wrong(generate([]), mentions("prompt", "[]"));
  await wrong(generate([1.5]), mentions("prompt", 1.5));
  await wrong(generate([1e6]), mentions("prompt", 1e6, 0, vocabSize - 1));
  await wrong(generate(Array(512).fill(3)), mentions("prompt", 512, 511, "contextLength=512"));
  await wrong(generate([{ role: "user" }]), mentions("messages", '{"role":"user"}', "content"));
  await wrong(generate(ids, { temperature: -1 }), mentions("temperature", -1, ">= 0"));
  await wrong(generate(ids, { temprature: 1 }), mentions("setting temprature.", "temperature"));
  await wrong(generate(ids, { stop: [""] }), mentions("stop", '[""]', 64));
  await wrong(generate(ids, { logitBias: { 1e6: 1 } }), mentions("logitBias", 1e6, 0, vocabSize - 1));
  await wrong(generate(ids, { topLogprobs: 21 }), mentions("topLogprobs", 21, 0, 20));
  await wrong(generate(ids, { seed: 2 ** 60 }), mentions("seed", 2 ** 60, "2^64 - 1", "bigint"));
  await wrong(generate(ids, { n: 0 }), mentions("n is 0", 1, 65536));
  await wrong(generate(ids, { n: 1e9 }), mentions("n is", 1e9, 1, 65536));
  await wrong(generate(ids, { adapter: 9 }), mentions("adapter", 9, "loadAdapter"));
  await wrong(generate(ids, { adapter: "a" }), mentions("adapter", '"a"', "loadAdapter"));
  await wrong(generate(ids, { stopTokenIds: [1e6] }), mentions("stopTokenIds", 1e6, vocabSize - 1));
  await wrong(generate(ids, null), mentions("options", null, "object"));
  await wrong(() => engine.logprobs(ids, { start: 0 }), mentions("Engine.logprobs", "start", 0, 1));
  await wrong(() => engine.logprobs(ids, { start: 99 }), mentions("Engine.logprobs", "start", 99, 1, ids.length));
  await wrong(() => engine.logprobs(ids, { temperature: 0 }), mentions("Engine.logprobs", "temperature", 0, "1e30"));
  await wrong(() => engine.removeAdapter(3), mentions("Engine.removeAdapter", "adapter", 3, "loadAdapter"));
  await wrong(() => engine.loadAdapter([bytes]), mentions("Engine.loadAdapter", "source", "bytes", "adapter_config.json", "adapter_model.safetensors"));
});

test("maxNewTokens beyond the context or 32 bits is limited to the context", async () => {
  const tokensOf = async (options) => (await take(engine.generate(ids, { temperature: 0, stopTokenIds: [], ...options }))).length;
  for (const maxNewTokens of [2 ** 31, 2 ** 32, Number.MAX_SAFE_INTEGER]) assert.equal(await tokensOf({ maxNewTokens, minNewTokens: maxNewTokens }), 512 - ids.length);
  const all = Array.from({ length: (await engine.info()).vocabSize }, (_, token) => token);
  const logitBias = Object.fromEntries(all.slice(0, -1).map((token) => [token, -100]));
  const short = await Engine.load(bytes, { threads: 1, contextLength: 64 });
  assert.equal((await take(short.generate([3], { maxNewTokens: 1, logitBias, stopTokenIds: all }))).length, 1);
  short.close();
});

test("a KV cache that is out of memory is rejected at load, one that is too small by request", async () => {
  for (const contextLength of [2 ** 24, 2 ** 31 - 1]) {
    await assert.rejects(Engine.load(bytes, { threads: 1, contextLength }), mentions("OutOfMemoryError: Engine.load", "1 MB", `contextLength=${contextLength}`, "4295 MB"));
  }
  const { kvBytes } = await engine.info();
  const small = await Engine.load(bytes, { threads: 1, kvBytes: kvBytes / 4 });
  await assert.rejects(take(small.generate(ids, { maxNewTokens: 400 })), mentions("WhetError: Engine.generate", ids.length, 400, "kvBytes", kvBytes / 4, "maxNewTokens"));
  small.close();
});

test("requests in progress keep a removed adapter", async () => {
  const adapter = await engine.loadAdapter(new URL("adapter/", FIXTURES));
  const options = { temperature: 0, maxNewTokens: 100, stopTokenIds: [] };
  const expected = [await samplesOf(engine, ids, { ...options, adapter }), await samplesOf(engine, ids, options)];
  const both = [samplesOf(engine, ids, { ...options, adapter }), samplesOf(engine, ids, options)];
  await engine.removeAdapter(adapter);
  assert.deepEqual(await Promise.all(both), expected);
  await assert.rejects(samplesOf(engine, ids, { adapter }), mentions("adapter", adapter, "loadAdapter"));
});

test("adapters of other models and other kinds than plain LoRA are rejected", async () => {
  const read = async (name) => readFile(new URL(`adapter/${name}`, FIXTURES));
  const [config, weights] = [JSON.parse(await read("adapter_config.json")), await read("adapter_model.safetensors")];
  const load = (changed, file = weights) =>
    engine.loadAdapter({ files: { "adapter_config.json": Buffer.from(JSON.stringify({ ...config, ...changed })), "adapter_model.safetensors": file } });
  await assert.rejects(load({ use_dora: true }), mentions("use_dora", true, "whet merge"));
  await assert.rejects(load({ peft_type: "IA3" }), mentions("peft_type", "IA3", "LORA"));
  await assert.rejects(load({ bias: "all" }), mentions("bias", "all", "none"));
  await assert.rejects(load({ lora_alpha: "x" }), mentions("alpha", "model.layers", '"x"'));
  await assert.rejects(load({}, weights.subarray(0, 1000)), mentions("adapter_model.safetensors", "damaged"));
  const renamed = Buffer.from(weights.toString("latin1").replaceAll("layers.1.", "layers.7."), "latin1");
  await assert.rejects(load({}, renamed), mentions("model.layers.7", "base model"));
});

test("closing an engine rejects its calls, in progress and later", async () => {
  const closing = await Engine.load(bytes, { threads: 1 });
  const running = take(closing.generate(ids, { maxNewTokens: 400 }));
  closing.close();
  closing.close();
  await assert.rejects(running, mentions("Engine: ", "closed", "Load the model again"));
  await assert.rejects(closing.info(), mentions("Engine: ", "closed"));
});
