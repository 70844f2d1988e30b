// Download sizes of the package.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";
import { libraries, options } from "../build.mjs";

const KB = 1024;
const sizeOf = (files) => files.reduce((sum, bytes) => sum + gzipSync(bytes, { level: 9 }).length, 0);

// 30 KB load and sample; the rest trims chats to the context, resumes downloads and bounds the cache.
test("the scripts are at most 84 KB compressed, without libraries 34 KB", async () => {
  const names = ["index", "worker", "thread", "hf"].map((name) => new URL(`../dist/${name}.js`, import.meta.url));
  const all = sizeOf(await Promise.all(names.map((name) => readFile(name))));
  assert.ok(all <= 84 * KB, `${all} bytes`);
  const { index, worker, thread } = options.entryPoints;
  const { outputFiles } = await build({ ...options, entryPoints: { index, worker, thread }, external: libraries, write: false });
  const ours = sizeOf(outputFiles.map(({ contents }) => contents));
  assert.ok(ours <= 34 * KB, `${ours} bytes`);
});

test("the lazily loaded chunk of folders and adapters is at most 12 KB", async () => {
  const bytes = await readFile(new URL("../dist/hf.js", import.meta.url));
  assert.ok(sizeOf([bytes]) <= 12 * KB, `${sizeOf([bytes])} bytes`);
});

test("the separate entry of primitives and kernels is at most 8 KB", async () => {
  const bytes = await readFile(new URL("../dist/ops.js", import.meta.url));
  assert.ok(sizeOf([bytes]) <= 8 * KB, `${sizeOf([bytes])} bytes`);
});

for (const name of ["threads", "threads-plain", "plain"]) {
  test(`${name}.wasm is at most 400 KB, compressed 152 KB`, async () => {
    const bytes = await readFile(new URL(`../dist/${name}.wasm`, import.meta.url));
    assert.ok(bytes.length <= 400 * KB, `${bytes.length} bytes`);
    assert.ok(sizeOf([bytes]) <= 152 * KB, `${sizeOf([bytes])} bytes, compressed`);
  });
}
