// Files by URL, Blob and bytes: resumed, cut, damaged and wrong downloads, against a real server.
import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { relative } from "node:path";
import { after, test } from "node:test";
import { pathToFileURL } from "node:url";
import { isFolder, listFiles, openReader, readRanges } from "../../src/sources.ts";
import { serve } from "../server.mjs";

const bytes = Uint8Array.from({ length: 300_000 }, (_, i) => (i * 2654435761) >>> 24);
const sha256 = createHash("sha256").update(bytes).digest("hex");
const noise = randomBytes(300_000); // incompressible
const server = await serve({ "a.gguf": Buffer.from(bytes), noise });
after(() => server.close());

async function load(source, options = {}) {
  const progress = [];
  const signal = options.signal ?? new AbortController().signal;
  const [[name, file]] = listFiles(source, "Engine.load");
  const reader = await openReader(name, file, { where: "Engine.load", onProgress: (each) => progress.push(each), ...options, signal });
  const read = await reader.read(0, reader.size);
  assert.deepEqual(await reader.read(100, 7), bytes.slice(100, 107));
  await reader.close?.();
  return { read: new Uint8Array(read), name, progress };
}

test("URLs, Blobs, Files, bytes and paths give the same bytes", async () => {
  const path = `${await mkdtemp(`${tmpdir()}/whet-`)}/a.gguf`;
  await writeFile(path, bytes);
  const shared = new SharedArrayBuffer(bytes.length);
  new Uint8Array(shared).set(bytes);
  for (const source of [server.url("a.gguf"), new URL(server.url("a.gguf")), new Blob([bytes]), new File([bytes], "a.gguf"), bytes, bytes.buffer, shared, pathToFileURL(path), path]) {
    const { read } = await load(source, { sha256 });
    assert.deepEqual(read, bytes);
  }
});

test("ranges are read one after the other, by a stream and without one", async () => {
  const ranges = [[100, 1100], [1100, 1101], [1101, 200_000], [250_000, 250_010], [299_990, 300_000]].map(([begin, end]) => ({ begin, end }));
  for (const source of [new Blob([bytes]), bytes, server.url("a.gguf")]) {
    const reader = await openReader("a.gguf", source, { where: "Engine.load", signal: new AbortController().signal, onProgress: () => {} });
    const found = [];
    for await (const [{ begin, end }, some] of readRanges(reader, ranges)) {
      assert.deepEqual(some, bytes.subarray(begin, end));
      found.push(begin);
    }
    assert.equal(found.length, ranges.length);
  }
  const short = await openReader("a.gguf", new Blob([bytes]), { where: "Engine.load" });
  await assert.rejects(async () => {
    for await (const _ of readRanges(short, [{ begin: 299_000, end: 300_001 }]));
  }, /^WhetError: Engine.load: a.gguf ends at byte 300000. It was cut while it was read/);
});

test("progress tells bytes and total, and ends with all", async () => {
  const { progress } = await load(server.url("a.gguf"));
  assert.deepEqual(progress.at(-1), { loadedBytes: bytes.length, totalBytes: bytes.length, phase: "download" });
});

test("a download that is cut goes on where it was", async () => {
  const before = server.requests.length;
  const { read } = await load(server.url("a.gguf?cut=100000"), { sha256 });
  assert.deepEqual(read, bytes);
  assert.deepEqual(server.requests.slice(before).map(({ range }) => range), [undefined, "bytes=100000-"]);
});

test("if range requests fail, the whole file is requested", async () => {
  const before = server.requests.length;
  assert.deepEqual((await load(server.url("a.gguf?cut=100000&rangeless"), { sha256 })).read, bytes);
  const ranges = server.requests.slice(before).map(({ range }) => range);
  assert.deepEqual([ranges[0], ranges[1], ranges.at(-1)], [undefined, "bytes=100000-", undefined]);
});

test("a file that changed before its download was resumed is fetched from its first byte", async () => {
  const progress = [];
  const onProgress = (each) => {
    if (progress.push(each) === 1) server.etag = "new";
  };
  const reader = await openReader("a.gguf", server.url("a.gguf?cut=100000&other"), { where: "f", signal: new AbortController().signal, onProgress });
  assert.deepEqual(new Uint8Array(await reader.read(0, reader.size)), bytes);
});

test("a busy server is tried again after its Retry-After", async () => {
  assert.deepEqual((await load(server.url("a.gguf?busy=0"))).read, bytes);
  await assert.rejects(load(server.url("a.gguf?busy=3600")), /could not be downloaded \(it answered 503 Service Unavailable, and to ask again after 3600; 0 bytes came\)/);
});

test("blob: and data: URLs are read where they are", async () => {
  const url = URL.createObjectURL(new Blob([bytes]));
  assert.deepEqual((await load(url)).read, bytes);
  assert.deepEqual((await load(`data:application/octet-stream;base64,${Buffer.from(bytes).toString("base64")}`)).read, bytes);
  URL.revokeObjectURL(url);
  await assert.rejects(load(url), /blob:.* cannot be read \(.*\). Pass the Blob itself/);
});

test("paths are paths, whatever characters they have", async () => {
  const folder = await mkdtemp(`${tmpdir()}/whet #?%-`);
  for (const name of ["a#b.gguf", "a?b.gguf", "50%20off.gguf", "100%.gguf", "c:d.gguf"]) {
    await writeFile(`${folder}/${name}`, bytes);
    assert.deepEqual(await load(`${folder}/${name}`).then(({ name, read }) => [name, read.length]), [name, bytes.length]);
    assert.deepEqual((await load(relative(process.cwd(), `${folder}/${name}`))).name, name);
  }
  assert.deepEqual(await isFolder(listFiles(`${folder}/`, "f")[0][1]), true);
  assert.deepEqual(listFiles("http://a/100%.gguf", "f")[0][0], "100%.gguf");
  await rm(folder, { recursive: true });
});

test("without an ETag it begins again, as the file may be another", async () => {
  const before = server.requests.length;
  assert.deepEqual((await load(server.url("a.gguf?cut=100000&etag=none"))).read, bytes);
  assert.deepEqual(server.requests.slice(before).map(({ range }) => range), [undefined, undefined]);
});

test("a download that is cut again and again says how far it came", async () => {
  await assert.rejects(load(server.url("a.gguf?cut=1&always&etag=none")), /could not be downloaded \(.*; 1 bytes came\). Load it again/);
});

test("a compressed answer is taken, whose length is not the file's", async () => {
  assert.deepEqual((await load(server.url("a.gguf?gzip"))).read, bytes);
});

test("a compressed download that is cut begins again, as ranges count compressed bytes", async () => {
  const reader = await openReader("noise", server.url("noise?gzip&cut=100000"), { where: "f", signal: new AbortController().signal, onProgress: () => {} });
  assert.deepEqual(Buffer.from(await reader.read(0, reader.size)), noise);
});

test("another hash, a wrong hash, no file and no server are told", async () => {
  for (const source of [server.url("a.gguf"), bytes]) {
    await assert.rejects(load(source, { sha256: "0".repeat(64) }), new RegExp(`has SHA-256 ${sha256}, expected 0{64}. It is another file, or damaged`));
  }
  await assert.rejects(load(server.url("b.gguf")), /answered 404 Not Found, expected the file. Correct the URL/);
  await assert.rejects(load("/nowhere/a.gguf"), /nowhere\/a.gguf cannot be read \(ENOENT/);
});

test("a download is aborted at once", async () => {
  const controller = new AbortController();
  const loading = load(server.url("a.gguf?cut=1000&always"), { signal: controller.signal });
  setTimeout(() => controller.abort(), 50);
  await assert.rejects(loading, { name: "AbortError" });
});

test("what is no file is refused", () => {
  for (const wrong of [undefined, null, 7, "", [], {}, { files: {} }, [7], { files: { a: 7 } }, "http://"]) {
    assert.throws(() => listFiles(wrong, "Engine.load"), /^WhetError: Engine.load: source is .*, expected a URL, a File or Blob/, String(wrong));
  }
  assert.deepEqual(listFiles({ files: { "config.json": bytes } }, "f"), [["config.json", bytes]]);
  assert.deepEqual(listFiles([new URL("http://a/b/c%20d.gguf?x=1")], "f").map(([name]) => name), ["c d.gguf"]);
});
