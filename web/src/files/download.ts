/** Resumable downloads, into the origin's private file system if the runtime has one, else into memory. */
import { MissingFileError, WhetError } from "../core/errors.js";
import { type CacheEntry, evictOldest, openEntry, type Sink, type Version } from "./cache.js";
import { byteReader, type Caller, checkSha256, type DownloadOptions, type Reader, wrapBytes } from "./reader.js";

const CHUNK_BYTES = 1 << 20;
const ATTEMPTS = 4;
const PAUSE_MS = 500; // before the second attempt; twice as long before each further one
const MAX_PAUSE_MS = 30_000; // a longer Retry-After fails the download
const BUSY = [408, 429, 500, 502, 503, 504];

/** A file that is read by ranges where it is. */
class ReadInPlace extends WhetError {}

class MemorySink implements Sink {
  size = 0;
  totalBytes = 0; // expected
  private bytes = new Uint8Array(0);

  constructor(private readonly isReadInPlace: DownloadOptions["isReadInPlace"]) {}

  private reserve(n: number): void {
    const longer = new Uint8Array(n);
    longer.set(this.bytes.subarray(0, this.size));
    this.bytes = longer;
  }

  write(bytes: Uint8Array): void {
    if (this.size === 0 && this.isReadInPlace?.(bytes)) throw new ReadInPlace();
    const size = this.size + bytes.length;
    if (size > this.bytes.length) this.reserve(size <= this.totalBytes ? this.totalBytes : 2 * size);
    this.bytes.set(bytes, this.size);
    this.size = size;
  }

  reset(): void {
    this.size = 0;
  }

  reader(name: string): Reader {
    return wrapBytes(this.bytes.subarray(0, this.size), name);
  }
}

/** Download a URL, or read it from the cache. */
export async function download(url: URL, name: string, options: Omit<DownloadOptions, "sha256"> & { sha256?: string }): Promise<Reader> {
  const { where, sha256 } = options;
  const entry = options.cache === false ? undefined : await openEntry(url, sha256);
  if (entry !== undefined) {
    const cached = await reuseCached(entry, url, options);
    if (cached !== undefined) return cached;
    try {
      await fetchIntoCache(entry, url, options);
      const reader = await entry.finish();
      try {
        if (sha256 !== undefined) await checkSha256(reader, sha256, where);
      } catch (error) {
        await entry.remove();
        throw error;
      }
      await entry.markComplete(sha256);
      return reader;
    } catch (error) {
      if (error instanceof MissingFileError) await entry.remove(); // a folder often lacks some of its optional files
      throw error;
    } finally {
      await entry.close();
    }
  }
  const sink = new MemorySink(sha256 === undefined ? options.isReadInPlace : undefined);
  try {
    await fetchInto(sink, url, undefined, options, ({ totalBytes }) => void (sink.totalBytes = totalBytes));
  } catch (error) {
    if (error instanceof ReadInPlace) return openRemoteRanges(url, name, { ...options, sha256 });
    throw error;
  }
  const reader = sink.reader(name);
  if (sha256 !== undefined) await checkSha256(reader, sha256, where);
  return reader;
}

/** Download into the cache. If the disk is full, evict other files and resume. */
async function fetchIntoCache(entry: CacheEntry, url: URL, options: DownloadOptions): Promise<void> {
  for (;;) {
    try {
      return await fetchInto(entry.sink, url, entry.version, options, (version) => entry.begin(version));
    } catch (error) {
      if ((error as Error)?.name !== "QuotaExceededError") throw error;
      if (!(await evictOldest())) throw new WhetError(`${options.where}: the browser's storage is full: ${url.href} does not fit. Free some, or pass cache: false.`);
    }
  }
}

/** Return a reader that requests only the ranges it reads, all of one version of the file. */
export async function openRemoteRanges(url: URL, name: string, options: DownloadOptions): Promise<Reader> {
  let known: Version | undefined;
  const request = async (begin: number, end: number, { where, signal }: Caller): Promise<Response> => {
    // Chromium's cache would answer concurrent requests of one URL in turn.
    const response = await fetch(url, { signal, cache: "no-store", headers: { range: `bytes=${begin}-${end - 1}` } });
    const version = { totalBytes: rangeTotal(response.headers) ?? 0, etag: response.headers.get("etag") };
    const hasRange = response.status === 206 || response.status === 416;
    const isOther = hasRange && known !== undefined && (version.etag !== null || version.totalBytes > 0) && !isSameVersion(known, version);
    if (response.status === 206 && !isOther) {
      known ??= version;
      return response;
    }
    await response.body?.cancel();
    if (BUSY.includes(response.status)) throw new Busy(response);
    const asked = `to a request of bytes ${begin} to ${end - 1}`;
    if (isOther) throw new WhetError(`${where}: ${url.href} has changed: it answered ${asked} with ${describe(version)}, expected ${describe(known!)}. Load it again.`);
    throw new (errorFor(response))(`${where}: ${url.href} answered ${response.status} ${response.statusText} ${asked}, expected 206. Correct the URL, or use a server that supports range requests.`);
  };
  const explain = (error: unknown, begin: number, end: number, { where, signal }: Caller): unknown => {
    if (signal.aborted) return signal.reason;
    if (error instanceof WhetError) return error;
    return new WhetError(`${where}: ${url.href}: bytes ${begin} to ${end - 1} could not be requested (${(error as Error)?.message ?? error}). Check the URL and the network.`);
  };
  const get = (begin: number, end: number, by: Caller) =>
    retry(by.signal, async () => {
      const bytes = new Uint8Array(await (await request(begin, end, by)).arrayBuffer());
      if (bytes.length !== end - begin) throw new TypeError(`received ${bytes.length} bytes`);
      return bytes;
    }).catch((error) => {
      throw explain(error, begin, end, by);
    });
  await get(0, 1, options);
  const readHead = () => fetch(url, { method: "HEAD", signal: options.signal }).catch((error) => {
    throw explain(error, 0, 1, options);
  });
  const size = known!.totalBytes || versionOf((await readHead()).headers).totalBytes;
  if (size === 0) throw new WhetError(`${options.where}: ${url.href} does not expose its size. Let its server send Access-Control-Expose-Headers: Content-Range.`);
  /** Stream one response; after a failure, another from there on. */
  const stream = (offset: number): ReadableStream<Uint8Array<ArrayBuffer>> | undefined => {
    let body: ReadableStreamDefaultReader<Uint8Array<ArrayBuffer>> | undefined;
    const next = async () => {
      try {
        body ??= (await request(offset, size, options)).body!.getReader();
        const { value } = await body.read();
        if (value === undefined) throw new TypeError("the response ended");
        return value;
      } catch (error) {
        body = undefined;
        throw error;
      }
    };
    const source: UnderlyingByteSource = {
      type: "bytes",
      async pull(controller) {
        if (offset === size) {
          controller.close();
          controller.byobRequest?.respond(0); // ends the pending read
          return;
        }
        const value = await retry(options.signal, next).catch((error) => {
          throw explain(error, offset, size, options);
        });
        offset += value.length;
        controller.enqueue(value);
      },
      cancel: () => body?.cancel(),
    };
    try {
      return new ReadableStream(source);
    } catch {
      return undefined; // a runtime without streams of bytes
    }
  };
  return { name, size, read: (offset, n, by = options) => get(offset, offset + n, by), stream };
}

const describe = ({ totalBytes, etag }: Version) => `${totalBytes} bytes and ETag ${etag ?? "none"}`;

/** Repeat what fails without an error of ours, with growing pauses. */
async function retry<T>(signal: AbortSignal, run: () => Promise<T>): Promise<T> {
  for (let attempt = 1; ; ++attempt) {
    try {
      return await run();
    } catch (error) {
      if (signal.aborted || error instanceof WhetError) throw error;
      await pauseAfter(error, attempt, signal);
    }
  }
}

/** Pause before the next attempt. Rethrow the error if there have been enough, or if the server asks for a long pause. */
async function pauseAfter(error: unknown, attempt: number, signal: AbortSignal): Promise<void> {
  const asked = error instanceof Busy ? error.pauseMs : 0;
  if (attempt >= ATTEMPTS || asked > MAX_PAUSE_MS) throw error;
  await pause(Math.max(asked, PAUSE_MS * 2 ** (attempt - 1)), signal);
}

/** Return the file's size by Content-Range, or undefined if a cross-origin server does not expose that header. */
function rangeTotal(headers: Headers): number | undefined {
  const found = /\/(\d+)$/.exec(headers.get("content-range") ?? "")?.[1];
  return found === undefined ? undefined : Number(found);
}

const errorFor = (response: Response) => (response.status === 404 ? MissingFileError : WhetError);

/** Return a reader of the cached file if it is complete and matches the server's version. Offline, the version is not checked. */
async function reuseCached(entry: CacheEntry, url: URL, { where, signal, sha256 }: { where: string; signal: AbortSignal; sha256?: string }): Promise<Reader | undefined> {
  if (!entry.isComplete) return undefined;
  if (sha256 !== undefined && entry.sha256 === sha256.toLowerCase()) return entry.reuse(sha256);
  const now = await fetch(url, { method: "HEAD", signal }).catch((error) => {
    if (signal.aborted) throw error;
  });
  const isSame = now === undefined || !now.ok || isSameVersion(entry.version!, versionOf(now.headers));
  if (!isSame) {
    entry.sink.reset();
    return undefined;
  }
  if (sha256 !== undefined) await checkSha256(await entry.finish(), sha256, where); // the server has the same file
  return entry.reuse(sha256 ?? entry.sha256);
}

const isSameVersion = (a: Version, b: Version) => (a.etag !== null && b.etag !== null ? a.etag === b.etag : a.totalBytes === b.totalBytes);

function versionOf(headers: Headers): Version {
  const isEncoded = headers.has("content-encoding"); // its length is not the file's
  return { totalBytes: isEncoded ? 0 : Number(headers.get("content-length") ?? 0), etag: headers.get("etag") };
}

/** Fetch the rest of a file into the sink, with retries. */
async function fetchInto(
  sink: Sink,
  url: URL,
  known: Version | undefined,
  { where, signal, onProgress }: DownloadOptions,
  begin: (version: Version) => unknown,
): Promise<void> {
  let version = known;
  let nUnanswered = 0; // range requests that failed without a response
  for (let attempt = 1; ; ++attempt) {
    const before = sink.size;
    // A download is resumed if the 206 response repeats its strong ETag. With a content-encoding it restarts, since ranges count
    // encoded bytes. Range needs no CORS preflight, but If-Range does. Old browsers send one for Range too: after two failures,
    // request the whole file.
    const isResumed = sink.size > 0 && sink.size < (version?.totalBytes ?? 0) && /^"/.test(version?.etag ?? "") && nUnanswered < 2;
    try {
      const response = await fetch(url, { signal, headers: isResumed ? { range: `bytes=${sink.size}-` } : {} }).catch((error) => {
        if (isResumed) ++nUnanswered;
        throw error;
      });
      const isRest = response.status === 206;
      if ((isRest && response.headers.get("etag") !== version?.etag) || (isResumed && response.status === 416)) {
        await response.body?.cancel();
        sink.reset(); // the server has another version
        continue;
      }
      if (BUSY.includes(response.status)) {
        await response.body?.cancel();
        throw new Busy(response);
      }
      if (!response.ok || response.body === null) {
        throw new (errorFor(response))(`${where}: ${url.href} answered ${response.status} ${response.statusText}, expected the file. Correct the URL, or check the server.`);
      }
      if (!isRest) {
        sink.reset();
        version = versionOf(response.headers);
        await begin(version);
      }
      const { totalBytes } = version!;
      for await (const bytes of readChunks(response.body)) {
        sink.write(bytes);
        onProgress({ loadedBytes: sink.size, totalBytes, phase: "download" });
      }
      if (totalBytes === 0 || sink.size === totalBytes) return;
      throw new TypeError(`it ended after ${sink.size} of ${totalBytes} bytes`);
    } catch (error) {
      if (signal.aborted) throw signal.reason;
      if (error instanceof WhetError || (error as Error)?.name === "QuotaExceededError") throw error;
      if (sink.size > before) attempt = 1; // progress resets the count
      await pauseAfter(error, attempt, signal).catch(() => {
        if (signal.aborted) throw signal.reason;
        const why = `${(error as Error)?.message ?? error}`;
        throw new WhetError(
          `${where}: ${url.href} could not be downloaded (${why}; received ${sink.size} bytes). Load it again when the network is back; a cross-origin server must send Access-Control-Allow-Origin.`,
        );
      });
    }
  }
}

/** Response that asks for a later attempt. */
class Busy extends Error {
  readonly pauseMs: number;

  constructor({ status, statusText, headers }: Response) {
    const after = headers.get("retry-after") ?? ""; // seconds, or a date
    super(`it answered ${status} ${statusText}${after && `, Retry-After: ${after}`}`);
    const ms = /^\d+$/.test(after) ? Number(after) * 1000 : Date.parse(after) - Date.now();
    this.pauseMs = ms > 0 ? ms : 0;
  }
}

/** Yield the body in chunks. A stream that reads into buffers overwrites each chunk with the next. */
async function* readChunks(body: ReadableStream<Uint8Array<ArrayBuffer>>): AsyncGenerator<Uint8Array> {
  const bytes = byteReader(body);
  const stream = bytes ?? body.getReader();
  let buffer = new ArrayBuffer(CHUNK_BYTES);
  const read = () => (bytes === undefined ? (stream as ReadableStreamDefaultReader<Uint8Array<ArrayBuffer>>).read() : bytes.read(new Uint8Array(buffer)));
  try {
    for (;;) {
      const { done, value } = await read();
      if (done || value === undefined) return;
      yield value;
      buffer = value.buffer;
    }
  } finally {
    stream.cancel().catch(() => {});
  }
}

function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}
