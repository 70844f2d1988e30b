// Download sizes of the package.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";
import { libraries, options } from "../build.mjs";

const KB = 1024;
const sizeOf = (files) => files.reduce((sum, bytes) => sum + gzipSync(bytes, { level: 9 }).length, 0);

// 30 KB load and sample; the rest trims chats to the context, resumes downloads, reads ranges, bounds the cache, and trains.
test("the scripts are at most 94 KB compressed, without libraries 49 KB", async () => {
  const names = ["index", "worker", "thread", "hf"].map((name) => new URL(`../dist/${name}.js`, import.meta.url));
  const all = sizeOf(await Promise.all(names.map((name) => readFile(name))));
  assert.ok(all <= 94 * KB, `${all} bytes`);
  const { index, worker, thread } = options.entryPoints;
  const { outputFiles } = await build({ ...options, entryPoints: { index, worker, thread }, external: libraries, write: false });
  const ours = sizeOf(outputFiles.map(({ contents }) => contents));
  assert.ok(ours <= 49 * KB, `${ours} bytes`);
});

test("the lazily loaded chunk of folders and adapters is at most 19 KB", async () => {
  const bytes = await readFile(new URL("../dist/hf.js", import.meta.url));
  assert.ok(sizeOf([bytes]) <= 19 * KB, `${sizeOf([bytes])} bytes`);
});

test("the lazily loaded chunk of the learner is at most 7 KB", async () => {
  const bytes = await readFile(new URL("../dist/learner.js", import.meta.url));
  assert.ok(sizeOf([bytes]) <= 7 * KB, `${sizeOf([bytes])} bytes`);
});

test("the lazily loaded part for GPUs is at most 36 KB: its chunk, and what its build has beyond the plain one", async () => {
  const [chunk, build, plain] = await Promise.all(["gpu.js", "gpu.wasm", "plain.wasm"].map((name) => readFile(new URL(`../dist/${name}`, import.meta.url))));
  const bytes = sizeOf([chunk, build]) - sizeOf([plain]);
  assert.ok(bytes <= 36 * KB, `${bytes} bytes`);
});

test("the separate entry of primitives and kernels is at most 8 KB", async () => {
  const bytes = await readFile(new URL("../dist/ops.js", import.meta.url));
  assert.ok(sizeOf([bytes]) <= 8 * KB, `${sizeOf([bytes])} bytes`);
});

const BUILDS = { threads: [453, 172], "threads-plain": [428, 164], plain: [427, 164], learner: [698, 245], gpu: [481, 185] };
for (const [name, [whole, compressed]] of Object.entries(BUILDS)) {
  test(`${name}.wasm is at most ${whole} KB, compressed ${compressed} KB`, async () => {
    const bytes = await readFile(new URL(`../dist/${name}.wasm`, import.meta.url));
    assert.ok(bytes.length <= whole * KB, `${bytes.length} bytes`);
    assert.ok(sizeOf([bytes]) <= compressed * KB, `${sizeOf([bytes])} bytes, compressed`);
  });
}
