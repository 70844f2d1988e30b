// Lifetime of engines: many of them without memory growth, and out of memory.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { Engine, OutOfMemoryError } from "../dist/index.js";
import { FIXTURES, readFixture, samplesOf } from "./fixtures.mjs";

const { ids, greedy, adapted } = (await readFixture("model")).cases.q8_0;
const bytes = await readFile(new URL("q8_0.gguf", FIXTURES));
const GREEDY = { temperature: 0, maxNewTokens: 8, stopTokenIds: [] };

test("1,000 abandoned requests do not grow the engine's memory", async () => {
  const engine = await Engine.load(bytes, { threads: 1 });
  const abandon = async () => {
    for await (const _ of engine.generate(ids, { n: 2, maxNewTokens: 400 })) break;
  };
  for (let i = 0; i < 20; ++i) await abandon();
  const { memoryBytes } = await engine.info();
  for (let i = 0; i < 1000; ++i) await abandon();
  assert.equal((await engine.info()).memoryBytes, memoryBytes);
  assert.deepEqual((await samplesOf(engine, ids, GREEDY))[0].tokens, greedy.slice(0, 8));
  engine.close();
});

test("closed engines free their memory", async () => {
  const live = async (n) => {
    for (let i = 0; i < n; ++i) {
      const engine = await Engine.load(bytes, { threads: 2 });
      await samplesOf(engine, ids, { ...GREEDY, maxNewTokens: 1 });
      engine.close();
    }
    return process.memoryUsage.rss();
  };
  const before = await live(8);
  const grown = (await live(16)) - before;
  assert.ok(grown < 60e6, `${grown / 1e6} MB of 16 engines`); // each takes at least 12 MB while open
});

test("closed engines, failed loads and aborted ones end all workers, which the caller's thread has started", async () => {
  const running = new Set();
  let nStarted = 0;
  const started = (worker) => {
    ++nStarted;
    running.add(worker);
    worker.on("exit", () => running.delete(worker));
  };
  const ended = async () => {
    for (let i = 0; i < 100 && running.size > 0; ++i) await new Promise((resolve) => setTimeout(resolve, 50));
    assert.deepEqual([nStarted, running.size], [3, 0]);
    nStarted = 0;
  };
  process.on("worker", started);
  (await Engine.load(bytes, { threads: 3 })).close();
  await ended();
  await assert.rejects(Engine.load(bytes, { threads: 3, kvBytes: 4.294e9 }), OutOfMemoryError);
  await ended();
  const controller = new AbortController();
  await assert.rejects(Engine.load(bytes, { threads: 3, signal: controller.signal, onProgress: () => controller.abort() }), { name: "AbortError" });
  await ended();
  process.off("worker", started);
});

test("an idle engine does not keep the process alive, even after an aborted request", () => {
  const program = `import("./dist/index.js").then(async ({ Engine }) => {
    const engine = await Engine.load(${JSON.stringify(new URL("q8_0.gguf", FIXTURES))}, { threads: 2 });
    for await (const _ of engine.generate(${JSON.stringify(ids)}, { maxNewTokens: 400 })) break;
    console.log("idle");
  });`;
  assert.equal(execFileSync(process.execPath, ["-e", program], { encoding: "utf8", timeout: 30_000 }), "idle\n");
});

test("a KV cache above 2 GiB works, and so do later allocations", async () => {
  const engine = await Engine.load(bytes, { threads: 2, kvBytes: 3.5e9 });
  assert.ok((await engine.info()).kvBytes > 3.4e9);
  const adapter = await engine.loadAdapter(new URL("adapter/", FIXTURES));
  assert.deepEqual(Array.from(await engine.logprobs(ids, { adapter })), adapted.scores.slice(0, ids.length - 1));
  for (const stop of [[], ["no such text"]]) assert.deepEqual((await samplesOf(engine, ids, { ...GREEDY, stop }))[0].tokens, greedy.slice(0, 8));
  engine.close();
});

test("out of memory is an OutOfMemoryError with the fix, and the next engine loads", async () => {
  await assert.rejects(Engine.load(bytes, { threads: 1, kvBytes: 4.294e9 }), (error) => {
    assert.ok(error instanceof OutOfMemoryError, String(error));
    assert.match(error.message, /smaller contextLength/);
    return true;
  });
  const engine = await Engine.load(bytes, { threads: 1 });
  assert.deepEqual((await samplesOf(engine, ids, GREEDY))[0].tokens, greedy.slice(0, 8));
  engine.close();
});
