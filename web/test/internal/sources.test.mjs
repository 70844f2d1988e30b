// Sources by URL, Blob, bytes and path: resumed, interrupted, damaged and wrong downloads from a real server.
import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { relative } from "node:path";
import { after, test } from "node:test";
import { pathToFileURL } from "node:url";
import { readRanges } from "../../src/files/reader.ts";
import { isFolder, listFiles, openReader, openRanges } from "../../src/files/sources.ts";
import { mentions } from "../mentions.mjs";
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

test("ranges are read in order, with and without a stream", async () => {
  const ranges = [[100, 1100], [1100, 1101], [1101, 200_000], [250_000, 250_010], [299_990, 300_000]].map(([begin, end]) => ({ begin, end }));
  const options = { where: "Engine.load", signal: new AbortController().signal, onProgress: () => {} };
  const remote = ["a.gguf?ranges", "a.gguf?cut=150000&always"].map((name) => openRanges("a.gguf", server.url(name), options)); // the second ends each response early
  for (const opened of [...[new Blob([bytes]), bytes, server.url("a.gguf")].map((source) => openReader("a.gguf", source, options)), ...remote]) {
    const reader = await opened;
    const found = [];
    for await (const [{ begin, end }, some] of readRanges(reader, ranges)) {
      assert.deepEqual(some, bytes.subarray(begin, end));
      found.push(begin);
    }
    assert.equal(found.length, ranges.length);
  }
  const starts = server.requests.filter(({ path, range }) => path === "/a.gguf" && range?.endsWith("-299999")).map(({ range }) => parseInt(range.slice(6)));
  assert.deepEqual(starts, [100, 100, 150_100]); // a stream goes over the gaps, and continues where it ended
  const short = await openReader("a.gguf", new Blob([bytes]), { where: "Engine.load" });
  await assert.rejects(async () => {
    for await (const _ of readRanges(short, [{ begin: 299_000, end: 300_001 }]));
  }, mentions("WhetError: Engine.load", "a.gguf", 300000));
});

test("progress reports received and total bytes, and ends with the total", async () => {
  const { progress } = await load(server.url("a.gguf"));
  assert.deepEqual(progress.at(-1), { loadedBytes: bytes.length, totalBytes: bytes.length, phase: "download" });
});

test("an interrupted download is resumed", async () => {
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

test("a file that changed before its download was resumed is fetched from the start", async () => {
  const progress = [];
  const onProgress = (each) => {
    if (progress.push(each) === 1) server.etag = "new";
  };
  const reader = await openReader("a.gguf", server.url("a.gguf?cut=100000&other"), { where: "f", signal: new AbortController().signal, onProgress });
  assert.deepEqual(new Uint8Array(await reader.read(0, reader.size)), bytes);
});

test("a busy server is retried after its Retry-After", async () => {
  assert.deepEqual((await load(server.url("a.gguf?busy=0"))).read, bytes);
  await assert.rejects(load(server.url("a.gguf?busy=3600")), mentions("a.gguf", 503, 3600, "0 bytes"));
});

test("blob: and data: URLs are read in place", async () => {
  const url = URL.createObjectURL(new Blob([bytes]));
  assert.deepEqual((await load(url)).read, bytes);
  assert.deepEqual((await load(`data:application/octet-stream;base64,${Buffer.from(bytes).toString("base64")}`)).read, bytes);
  URL.revokeObjectURL(url);
  await assert.rejects(load(url), mentions("blob:", "Pass the Blob"));
});

test("paths may contain any characters", async () => {
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

test("without an ETag an interrupted download restarts", async () => {
  const before = server.requests.length;
  assert.deepEqual((await load(server.url("a.gguf?cut=100000&etag=none"))).read, bytes);
  assert.deepEqual(server.requests.slice(before).map(({ range }) => range), [undefined, undefined]);
});

test("a download that keeps failing reports the received bytes", async () => {
  await assert.rejects(load(server.url("a.gguf?cut=1&always&etag=none")), mentions("a.gguf", "1 bytes", "Load it again"));
});

test("a compressed response works, though its length is not the file's", async () => {
  assert.deepEqual((await load(server.url("a.gguf?gzip"))).read, bytes);
});

test("an interrupted compressed download restarts, as ranges count compressed bytes", async () => {
  const reader = await openReader("noise", server.url("noise?gzip&cut=100000"), { where: "f", signal: new AbortController().signal, onProgress: () => {} });
  assert.deepEqual(Buffer.from(await reader.read(0, reader.size)), noise);
});

test("a wrong hash, a missing URL and a missing path are rejected", async () => {
  for (const source of [server.url("a.gguf"), bytes]) {
    await assert.rejects(load(source, { sha256: "0".repeat(64) }), mentions("SHA-256", sha256, "0".repeat(64), "clearCache"));
  }
  await assert.rejects(load(server.url("b.gguf")), mentions("b.gguf", 404, "URL"));
  await assert.rejects(load("/nowhere/a.gguf"), mentions("nowhere/a.gguf", "ENOENT"));
});

test("an AbortSignal aborts a download immediately", async () => {
  const controller = new AbortController();
  const loading = load(server.url("a.gguf?cut=1000&always"), { signal: controller.signal });
  setTimeout(() => controller.abort(), 50);
  await assert.rejects(loading, { name: "AbortError" });
});

test("invalid sources are rejected", () => {
  for (const wrong of [undefined, null, 7, "", [], {}, { files: {} }, [7], { files: { a: 7 } }, "http://"]) {
    assert.throws(() => listFiles(wrong, "Engine.load"), mentions("WhetError: Engine.load", "source", "URL", "Blob"), String(wrong));
  }
  assert.deepEqual(listFiles({ files: { "config.json": bytes } }, "f"), [["config.json", bytes]]);
  assert.deepEqual(listFiles([new URL("http://a/b/c%20d.gguf?x=1")], "f").map(([name]) => name), ["c d.gguf"]);
});
