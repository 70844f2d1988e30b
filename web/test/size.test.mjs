// What a page downloads.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";
import { libraries, options } from "../build.mjs";

const KB = 1024;
const sizeOf = (files) => files.reduce((sum, bytes) => sum + gzipSync(bytes, { level: 9 }).length, 0);

test("the scripts are at most 80 KB, compressed, of which ours are 30 KB", async () => {
  const names = ["index", "worker", "thread"].map((name) => new URL(`../dist/${name}.js`, import.meta.url));
  const all = sizeOf(await Promise.all(names.map((name) => readFile(name))));
  assert.ok(all <= 80 * KB, `${all} bytes`);
  const { outputFiles } = await build({ ...options, external: [...options.external, ...libraries], write: false });
  const ours = sizeOf(outputFiles.map(({ contents }) => contents));
  assert.ok(ours <= 30 * KB, `${ours} bytes`);
});
