/** Model sources: URLs, Files and bytes, read in ranges, so that a file is never in memory as a whole. */
import { sha256 } from "@noble/hashes/sha2.js";
import { bytesToHex } from "@noble/hashes/utils.js";
import { MissingFileError, WhetError } from "./errors.js";
import { download, type DownloadOptions } from "./download.js";
import { nodeModule, urlOf } from "./port.js";
import { show } from "./sampling.js";

/** One file. */
export type Source = string | URL | Blob | ArrayBuffer | SharedArrayBuffer | Uint8Array;
/** One or several files: the parts of a split GGUF file, an input's FileList, or a folder's files by name. */
export type Sources = Source | readonly Source[] | ArrayLike<Blob> | { readonly files: Readonly<Record<string, Source>> };

export interface Reader {
  name: string;
  size: number;
  read(offset: number, n: number): Promise<Uint8Array>;
  /** Stream from an offset; undefined if only ranges can be read. */
  stream?(offset: number): ReadableStream<Uint8Array<ArrayBuffer>> | undefined;
  close?(): Promise<void>;
}

export interface Progress {
  /** Bytes so far, of the file or all its parts. */
  loadedBytes: number;
  /** 0 if the server does not report the size. */
  totalBytes: number;
  /** "download": bytes from the network; "pack": bytes that are packed into the engine. */
  phase: "download" | "pack";
}

/** Return the base name of a source: "model.gguf". */
export function nameOf(source: Source): string {
  if (isUrl(source)) return isInPage(urlOf(source)) ? "Blob" : decode(urlOf(source).pathname.split("/").pop() ?? "");
  if (source instanceof Blob) return "name" in source ? String(source.name) : "Blob";
  return "bytes";
}

/** Decode a part of a URL; return it unchanged if a percent sign is not an escape. */
function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Whether a URL's bytes are already in the page. */
const isInPage = ({ protocol }: URL) => protocol === "blob:" || protocol === "data:";

export const isRemote = ({ protocol }: URL) => protocol !== "file:" && protocol !== "blob:" && protocol !== "data:";

/** Return a source as [name, file] entries, with absolute URLs as strings. */
export function listFiles(sources: Sources, where: string): [string, Source][] {
  const invalid = (source: unknown) =>
    new WhetError(`${where}: source is ${show(source)}, expected a URL, a File or Blob, the bytes of a file, an array of such parts, or {files: {name: file}}.`);
  const check = (source: unknown): Source => {
    const isFile =
      (typeof source === "string" && source !== "") || source instanceof URL || source instanceof Blob || source instanceof Uint8Array ||
      source instanceof ArrayBuffer || (typeof SharedArrayBuffer !== "undefined" && source instanceof SharedArrayBuffer);
    if (!isFile) throw invalid(source);
    if (!isUrl(source as Source)) return source as Source;
    try {
      return urlOf(source as string).href;
    } catch {
      throw invalid(source);
    }
  };
  if (Array.isArray(sources) || isFileList(sources)) {
    if (sources.length === 0) throw invalid(sources);
    return Array.from(sources as ArrayLike<Source>, (source) => [nameOf(check(source)), check(source)]);
  }
  if (typeof sources === "object" && sources !== null && "files" in sources) {
    const files = Object.entries(sources.files ?? {});
    if (files.length === 0) throw invalid(sources);
    return files.map(([name, source]) => [name, check(source)]);
  }
  return [[nameOf(check(sources)), check(sources)]];
}

const isFileList = (sources: unknown): sources is ArrayLike<Blob> => typeof FileList !== "undefined" && sources instanceof FileList;

/** Open one file. URLs are downloaded completely, into the cache if there is one. */
export async function openReader(name: string, source: Source, options: DownloadOptions): Promise<Reader> {
  const reader = await open(name, source, options);
  const expected = sha256Of(options.sha256, name);
  if (expected !== undefined && !isUrl(source)) await checkSha256(reader, expected, options.where);
  return reader;
}

export const isUrl = (source: Source): source is string | URL => typeof source === "string" || source instanceof URL;

/** Whether a source is a folder's URL, with a trailing slash, or its path. */
export async function isFolder(source: Source): Promise<boolean> {
  if (!isUrl(source)) return false;
  const url = urlOf(source);
  if (url.pathname.endsWith("/") || url.protocol !== "file:") return url.pathname.endsWith("/");
  return nodeModule("node:fs/promises").stat(url).then((found) => found.isDirectory(), () => false);
}

async function open(name: string, source: Source, options: DownloadOptions): Promise<Reader> {
  if (source instanceof Uint8Array) return wrapBytes(source, name);
  if (source instanceof Blob) return wrapBlob(source, name);
  if (!isUrl(source)) return wrapBytes(new Uint8Array(source), name);
  const url = urlOf(source);
  if (url.protocol === "file:") return openFile(url, options.where);
  if (isInPage(url)) return wrapBlob(await fetchBlob(url, options.where), name);
  return download(url, name, { ...options, sha256: sha256Of(options.sha256, name) });
}

function fetchBlob(url: URL, where: string): Promise<Blob> {
  return fetch(url)
    .then((response) => response.blob())
    .catch((error: Error) => {
      throw new WhetError(`${where}: ${url.href.slice(0, 80)} cannot be read (${error.message}). Pass the Blob itself, or its URL before it is revoked.`);
    });
}

function sha256Of(given: DownloadOptions["sha256"], name: string): string | undefined {
  return typeof given === "string" ? given : given?.[name];
}

export function wrapBytes(bytes: Uint8Array, name: string): Reader {
  return { name, size: bytes.length, read: async (offset, n) => bytes.subarray(offset, offset + n) };
}

export function wrapBlob(blob: Blob, name: string): Reader {
  return {
    name,
    size: blob.size,
    read: async (offset, n) => new Uint8Array(await blob.slice(offset, offset + n).arrayBuffer()),
    stream: (offset) => blob.slice(offset).stream(),
  };
}

const truncated = (name: string, at: number) => new WhetError(`${name} ends at byte ${at}. It was truncated while it was read.`);

async function openFile(url: URL, where: string): Promise<Reader> {
  const { open } = nodeModule("node:fs/promises");
  const path = nodeModule("node:url").fileURLToPath(url);
  const file = await open(url).catch((error: NodeJS.ErrnoException) => {
    throw new (error.code === "ENOENT" ? MissingFileError : WhetError)(`${where}: ${path} cannot be read (${error.message}). Pass the path of a model file.`);
  });
  return {
    name: path,
    size: (await file.stat()).size,
    async read(offset, n) {
      const bytes = new Uint8Array(n);
      for (let done = 0; done < n; ) {
        const { bytesRead } = await file.read(bytes, done, n - done, offset + done);
        if (bytesRead === 0) throw truncated(`${where}: ${path}`, offset + done);
        done += bytesRead;
      }
      return bytes;
    },
    close: () => file.close(),
  };
}

/** Byte range of a file. */
export interface Range {
  begin: number;
  end: number;
}

/** Yield the bytes of ascending ranges. The next range may overwrite the buffer of the last.
 *
 * A stream reads into one buffer. Slices of a blob would take four times as long and hold tens of megabytes until the next
 * garbage collection. */
export async function* readRanges<R extends Range>(reader: Reader, ranges: readonly R[]): AsyncGenerator<[R, Uint8Array]> {
  let stream: ReadableStreamBYOBReader | undefined;
  let buffer = new ArrayBuffer(Math.max(0, ...ranges.map(({ begin, end }) => end - begin)));
  let at = NaN; // position of the stream
  try {
    for (const range of ranges) {
      const { begin, end } = range;
      if (begin !== at) {
        stream?.cancel().catch(() => {});
        stream = byteReader(reader.stream?.(begin));
      }
      if (stream === undefined) {
        yield [range, await reader.read(begin, end - begin)];
        continue;
      }
      for (at = begin; at < end; ) {
        const { value } = await stream.read(new Uint8Array(buffer, at - begin, end - at));
        if (!value?.length) throw truncated(`Engine.load: ${reader.name}`, at);
        buffer = value.buffer;
        at += value.length;
      }
      yield [range, new Uint8Array(buffer, 0, end - begin)];
    }
  } finally {
    stream?.cancel().catch(() => {});
  }
}

/** Return a stream's reader into caller-owned buffers, or undefined if the runtime does not support it. */
export function byteReader(stream: ReadableStream<Uint8Array<ArrayBuffer>> | undefined): ReadableStreamBYOBReader | undefined {
  try {
    return stream?.getReader({ mode: "byob" });
  } catch {
    return undefined;
  }
}

/** Check digests before a download. */
export function checkDigests(given: DownloadOptions["sha256"], where: string): void {
  for (const each of typeof given === "object" && given !== null ? Object.values(given) : [given]) {
    const isDigest = each === undefined || (typeof each === "string" && /^[0-9a-f]{64}$/i.test(each));
    if (!isDigest) throw new WhetError(`${where}: sha256 is ${show(each)}, expected 64 hexadecimal digits.`);
  }
}

const CHUNK_BYTES = 4 << 20;

/** Throw if the file's SHA-256 differs. */
export async function checkSha256(reader: Reader, expected: string, where: string): Promise<void> {
  const hash = sha256.create();
  for (let at = 0; at < reader.size; at += CHUNK_BYTES) hash.update(await reader.read(at, Math.min(CHUNK_BYTES, reader.size - at)));
  const found = bytesToHex(hash.digest());
  if (found !== expected.toLowerCase()) {
    throw new WhetError(`${where}: ${reader.name} has SHA-256 ${found}, expected ${expected.toLowerCase()}. The file differs or is damaged: correct sha256, or download it again (after clearCache if it is cached).`);
  }
}
