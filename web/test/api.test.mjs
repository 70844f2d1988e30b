// What a page does with an engine: prompts of every kind, several at a time, ends, and what is refused.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { Engine } from "../dist/index.js";
import { FIXTURES, readFixture, samplesOf } from "./fixtures.mjs";
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

test("a text, messages and token ids are prompts of the same tokens", async () => {
  const tokensOf = async (given, options) => (await samplesOf(engine, given, { ...GREEDY, ...options }))[0].tokens;
  assert.deepEqual((await tokensOf(ids)).slice(0, 8), greedy.slice(0, 8));
  const stops = [1];
  assert.deepEqual(await tokensOf(prompt), await tokensOf(ids, { stopTokenIds: stops }));
  assert.deepEqual(await tokensOf(messages), await tokensOf(chatIds, { stopTokenIds: stops }));
  assert.deepEqual(await tokensOf(Uint16Array.from(ids)), await tokensOf(ids));
});

test("a chat keeps what was said, also what was cut", async () => {
  const chat = engine.chat({ system: "Be brief.", ...GREEDY });
  const said = (await take(chat.send("a"))).map(({ text }) => text).join("");
  await take(chat.send("b"), 2);
  assert.deepEqual(chat.messages.map(({ role }) => role), ["system", "user", "assistant", "user", "assistant"]);
  assert.equal(chat.messages[2].content, said);
});

test("a chat answers one message at a time", async () => {
  const chat = engine.chat(GREEDY);
  const first = take(chat.send("one"));
  await assert.rejects(take(chat.send("two")), /^WhetError: Chat.send: another reply of this chat is under way. Read it to its end, or leave its loop/);
  await first;
  await take(chat.send("two"), 1); // left
  await take(chat.send("three"));
  assert.deepEqual(chat.messages.filter(({ role }) => role === "user").map(({ content }) => content), ["one", "two", "three"]);
});

test("every reply of a chat is drawn with its own seed, as in whet chat", async () => {
  const options = { temperature: 1, maxNewTokens: 12, seed: 2n ** 64n - 1n };
  const tokensOf = async (tokens) => (await take(tokens)).map(({ token }) => token);
  const chat = engine.chat(options);
  for (const [content, seed] of [["a", options.seed], ["b", 0], ["c", 1]]) {
    const asked = [...chat.messages, { role: "user", content }];
    assert.deepEqual(await tokensOf(chat.send(content)), await tokensOf(engine.generate(asked, { ...options, seed })));
  }
  const asked = [...chat.messages, { role: "user", content: "d" }];
  assert.deepEqual(await tokensOf(chat.send("d", { seed: 9 })), await tokensOf(engine.generate(asked, { ...options, seed: 9 })));
  await assert.rejects(take(engine.chat({ seed: -1 }).send("a")), /seed is -1, expected an integer from 0/);
});

test("a chat that reaches its context drops its oldest turns, and keeps the system message", async () => {
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
    await assert.rejects(take(chat.send("long ".repeat(context))), /^WhetError: Chat.send: content takes \d+ tokens .* of a context of \d+ a reply needs \d+/);
    assert.deepEqual(chat.messages, before);
    short.close();
  }
});

test("requests run beside each other, each as it runs alone", async () => {
  const options = { temperature: 1, maxNewTokens: 20, seed: 3, n: 3 };
  const alone = await samplesOf(engine, ids, options);
  const both = await Promise.all([samplesOf(engine, ids, options), samplesOf(engine, ids, options), samplesOf(engine, chatIds, options)]);
  assert.deepEqual(both.slice(0, 2), [alone, alone]);
});

test("a signal ends a request between two tokens, and so does leaving the loop", async () => {
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
  assert.equal((await take(engine.generate(ids, GREEDY))).length, 8); // the engine goes on
});

test("engines do not know of each other", async () => {
  const other = await Engine.load(new URL("f32.gguf", FIXTURES), { threads: 1 });
  const [mine, its] = await Promise.all([samplesOf(engine, ids, GREEDY), samplesOf(other, ids, GREEDY)]);
  assert.deepEqual(mine[0].tokens, greedy.slice(0, 8));
  assert.deepEqual(its[0].tokens, cases.f32.greedy.slice(0, 8));
  other.close();
});

test("the parts of a split file are one model, in any order", async () => {
  const paths = [part(2), part(1), part(3)];
  const files = await Promise.all(paths.map(async (path) => new File([await readFile(path)], path.pathname.split("/").pop())));
  for (const source of [paths, files]) {
    const split = await Engine.load(source, { threads: 1 });
    assert.deepEqual((await samplesOf(split, ids, GREEDY))[0].tokens, cases.f32.greedy.slice(0, 8));
    split.close();
  }
  await assert.rejects(Engine.load([part(1), part(3)]), /source has 2 parts of 3, and part 2 is missing. Give every part once/);
  await assert.rejects(Engine.load(part(1)), /is one of 3 parts, and 1 came. Give all parts/);
  await assert.rejects(Engine.load([bytes, bytes]), /expected the parts of one GGUF file, named/);
});

test("a URL is loaded with progress, and estimated from its head alone", async () => {
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
  await assert.rejects(Engine.load(server.url("a.txt")), /Engine.load: .*a.txt.*: /);
  await assert.rejects(Engine.estimate(server.url("b.gguf")), /answered 404/);
});

test("a download that is cut, and a signal while it loads", async () => {
  const cut = await Engine.load(server.url("q8_0.gguf?cut=200000"), { threads: 1 });
  assert.deepEqual((await samplesOf(cut, ids, GREEDY))[0].tokens, greedy.slice(0, 8));
  cut.close();
  const controller = new AbortController();
  const loading = Engine.load(server.url("q8_0.gguf?cut=1000&always"), { signal: controller.signal });
  setTimeout(() => controller.abort(), 200);
  await assert.rejects(loading, { name: "AbortError" });
});

test("a file that is damaged is refused, and the next one loads", async () => {
  await assert.rejects(Engine.load(bytes.subarray(0, bytes.length - 1000)), /Engine.load: bytes: /);
  await assert.rejects(Engine.load(bytes.subarray(0, 100)), /Engine.load: bytes: /);
  await assert.rejects(Engine.load(new Uint8Array(0)), /Engine.load: bytes: /);
  const noise = Uint8Array.from(bytes, (byte, i) => (i > 200 && i < 3000 ? byte ^ 0xa5 : byte));
  await assert.rejects(Engine.load(noise), /Engine.load: bytes: /);
  (await Engine.load(bytes, { threads: 1 })).close();
});

test("arguments are refused by name, with what came and what was expected", async () => {
  const wrong = (run, message) => assert.rejects(async () => run(), message);
  await wrong(() => Engine.load(), /Engine.load: source is undefined, expected a URL/);
  await wrong(() => Engine.load(bytes, { threads: 0 }), /threads is 0, expected an integer from 1 to 128/);
  await wrong(() => Engine.load(bytes, { thread: 2 }), /there is no option thread. There are: threads,/);
  await wrong(() => Engine.load(bytes, { signal: 1 }), /signal is 1, expected an AbortSignal/);
  await wrong(() => Engine.load(bytes, { onProgress: 1 }), /onProgress is 1, expected a function/);
  await wrong(() => Engine.load(bytes, { threads: 1000 }), /threads is 1000, expected an integer from 1 to 128/);
  await wrong(() => Engine.load(bytes, { contextLength: 2 ** 33 }), /contextLength is 8589934592, expected an integer from 1 to 2147483647/);
  await wrong(() => Engine.load(bytes, { kvBytes: 1 }), /kvBytes is 1, expected at least \d+, the keys and values of a prompt and its sample/);
  for (const sha256 of ["xyz", 7, { "model.gguf": "xyz" }]) await wrong(() => Engine.load(server.url("none"), { sha256 }), /sha256 is ("xyz"|7), expected 64 hexadecimal digits/);
  await wrong(() => Engine.load(bytes, { sha256: "0".repeat(64) }), /has SHA-256 [0-9a-f]{64}, expected 0{64}/);
  const generate = (...args) => () => take(engine.generate(...args));
  await wrong(generate(), /Engine.generate: prompt is undefined, expected a text, messages or token ids/);
  await wrong(generate(""), /prompt has no tokens/);
  await wrong(generate([]), /prompt is \[\], expected/);
  await wrong(generate([1.5]), /prompt has 1.5, expected/);
  await wrong(generate([1e6]), /prompt has the token 1000000, expected ids from 0 to \d+/);
  await wrong(generate(Array(512).fill(3)), /prompt has 512 tokens, expected at most 511 with contextLength=512/);
  await wrong(generate([{ role: "user" }]), /messages has \{"role":"user"\}, expected objects with a role and a content/);
  await wrong(generate(ids, { temperature: -1 }), /temperature is -1, expected a finite number >= 0/);
  await wrong(generate(ids, { temprature: 1 }), /there is no setting temprature/);
  await wrong(generate(ids, { stop: [""] }), /stop is \[""\], expected at most 64 strings/);
  await wrong(generate(ids, { logitBias: { 1e6: 1 } }), /logitBias has the token 1000000, expected ids from 0 to/);
  await wrong(generate(ids, { topLogprobs: 21 }), /topLogprobs is 21, expected an integer from 0 to 20/);
  await wrong(generate(ids, { seed: 2 ** 60 }), /expected an integer from 0 to 2\^64 - 1 \(above 2\^53 - 1 as a bigint\)/);
  await wrong(generate(ids, { n: 0 }), /n is 0, expected an integer from 1 to 65536/);
  await wrong(generate(ids, { n: 1e9 }), /n is 1000000000, expected an integer from 1 to 65536/);
  await wrong(generate(ids, { adapter: 9 }), /adapter is 9, and there is no such adapter. Pass what loadAdapter returned/);
  await wrong(generate(ids, { adapter: "a" }), /adapter is "a", expected what loadAdapter returned/);
  await wrong(generate(ids, { stopTokenIds: [1e6] }), /stopTokenIds has the token 1000000/);
  await wrong(generate(ids, null), /options is null, expected an object/);
  await wrong(() => engine.logprobs(ids, { start: 0 }), /start is 0, expected an integer from 1 to/);
  await wrong(() => engine.logprobs(ids, { start: 99 }), /start is 99, expected 1 to \d+/);
  await wrong(() => engine.logprobs(ids, { temperature: 0 }), /temperature is 0, expected a finite number > 0/);
  await wrong(() => engine.removeAdapter(3), /adapter is 3, and there is no such adapter/);
  await wrong(() => engine.loadAdapter([bytes]), /source has bytes, and no adapter_config.json. Give both files that PEFT saves/);
});

test("counts beyond the context and 32 bits are as the context", async () => {
  const tokensOf = async (options) => (await take(engine.generate(ids, { temperature: 0, stopTokenIds: [], ...options }))).length;
  for (const maxNewTokens of [2 ** 31, 2 ** 32, Number.MAX_SAFE_INTEGER]) assert.equal(await tokensOf({ maxNewTokens, minNewTokens: maxNewTokens }), 512 - ids.length);
  const all = Array.from({ length: (await engine.info()).vocabSize }, (_, token) => token);
  const logitBias = Object.fromEntries(all.slice(0, -1).map((token) => [token, -100]));
  const short = await Engine.load(bytes, { threads: 1, contextLength: 64 });
  assert.equal((await take(short.generate([3], { maxNewTokens: 1, logitBias, stopTokenIds: all }))).length, 1);
  short.close();
});

test("keys and values that cannot be held are refused, at load or by request", async () => {
  for (const contextLength of [2 ** 24, 2 ** 31 - 1]) {
    await assert.rejects(Engine.load(bytes, { threads: 1, contextLength }), /^OutOfMemoryError: Engine.load: the weights take 1 MB, and keys and values \d+ MB with contextLength=\d+; the engine's memory is 4295 MB at most/);
  }
  const { kvBytes } = await engine.info();
  const small = await Engine.load(bytes, { threads: 1, kvBytes: kvBytes / 4 });
  await assert.rejects(take(small.generate(ids, { maxNewTokens: 400 })), /^WhetError: Engine.generate: \d+ \+ 400 tokens need \d+ bytes of KV cache, and kvBytes is \d+. Shorten the prompt or maxNewTokens, or load the model with larger kvBytes/);
  small.close();
});

test("an adapter that is removed stays with the requests that have it", async () => {
  const adapter = await engine.loadAdapter(new URL("adapter/", FIXTURES));
  const options = { temperature: 0, maxNewTokens: 100, stopTokenIds: [] };
  const alone = [await samplesOf(engine, ids, { ...options, adapter }), await samplesOf(engine, ids, options)];
  const both = [samplesOf(engine, ids, { ...options, adapter }), samplesOf(engine, ids, options)];
  await engine.removeAdapter(adapter);
  assert.deepEqual(await Promise.all(both), alone);
  await assert.rejects(samplesOf(engine, ids, { adapter }), /adapter is \d+, and there is no such adapter/);
});

test("an adapter of another model, and one that is no plain LoRA, are refused", async () => {
  const read = async (name) => readFile(new URL(`adapter/${name}`, FIXTURES));
  const [config, weights] = [JSON.parse(await read("adapter_config.json")), await read("adapter_model.safetensors")];
  const load = (changed, file = weights) =>
    engine.loadAdapter({ files: { "adapter_config.json": Buffer.from(JSON.stringify({ ...config, ...changed })), "adapter_model.safetensors": file } });
  await assert.rejects(load({ use_dora: true }), /use_dora is true; only plain LoRA is read. Merge it: whet merge/);
  await assert.rejects(load({ peft_type: "IA3" }), /peft_type is "IA3", expected "LORA"/);
  await assert.rejects(load({ bias: "all" }), /bias is "all", expected "none"/);
  await assert.rejects(load({ lora_alpha: "x" }), /the alpha of model.layers.0.self_attn.q_proj is "x"|the alpha of .* is "x"/);
  await assert.rejects(load({}, weights.subarray(0, 1000)), /is no safetensors file, or damaged/);
  const renamed = Buffer.from(weights.toString("latin1").replaceAll("layers.1.", "layers.7."), "latin1");
  await assert.rejects(load({}, renamed), /it is an adapter of another model: it has model.layers.7/);
});

test("a closed engine says so, and what runs in it ends", async () => {
  const closing = await Engine.load(bytes, { threads: 1 });
  const running = take(closing.generate(ids, { maxNewTokens: 400 }));
  closing.close();
  closing.close();
  await assert.rejects(running, /Engine: it is closed. Load the model again/);
  await assert.rejects(closing.info(), /Engine: it is closed/);
});
