/** Downloads that go on where they were cut, into the origin's private file system where there is one, else into memory. */
import { MissingFileError, WhetError } from "./errors.js";
import { openCache, removeOldest, type Stored } from "./cache.js";
import { byteReader, checkSha256, isRemote, isUrl, ofBytes, openReader, type Progress, type Reader, type Source } from "./sources.js";
import { urlOf } from "./port.js";

export interface DownloadOptions {
  /** What begins the errors. */
  where: string;
  signal: AbortSignal;
  onProgress(progress: Progress): void;
  /** Of the file, or of each by name: 64 hexadecimal digits. A file of this hash in the cache is not asked for again. */
  sha256?: string | Readonly<Record<string, string>>;
  /** Keep downloads in the browser's private file system; true where it is left out. */
  cache?: boolean;
}

const CHUNK_BYTES = 1 << 20;
const ATTEMPTS = 4;
const PAUSE_MS = 500; // before the second attempt; twice as long before each further one
const LONGEST_PAUSE_MS = 30_000; // of Retry-After; a longer one ends the download
const BUSY = [408, 429, 500, 502, 503, 504];

/** Bytes that grow. */
export interface Sink {
  readonly size: number;
  write(bytes: Uint8Array): void;
  reset(): void;
}

class MemorySink implements Sink {
  size = 0;
  private bytes = new Uint8Array(0);

  expect(n: number): void {
    if (n <= this.bytes.length) return;
    const longer = new Uint8Array(n);
    longer.set(this.bytes.subarray(0, this.size));
    this.bytes = longer;
  }

  write(bytes: Uint8Array): void {
    const size = this.size + bytes.length;
    if (size > this.bytes.length) this.expect(2 * size);
    this.bytes.set(bytes, this.size);
    this.size = size;
  }

  reset(): void {
    this.size = 0;
  }

  reader(name: string): Reader {
    return ofBytes(this.bytes.subarray(0, this.size), name);
  }
}

/** What a server says of a file. */
export interface Version {
  totalBytes: number;
  etag: string | null;
}

export async function download(url: URL, name: string, options: Omit<DownloadOptions, "sha256"> & { sha256?: string }): Promise<Reader> {
  const { where, sha256 } = options;
  const stored = options.cache === false ? undefined : await openCache(url, sha256);
  if (stored !== undefined) {
    const found = await fromCache(stored, url, options);
    if (found !== undefined) return found;
    try {
      await fetchIntoCache(stored, url, options);
      const reader = await stored.finish();
      try {
        if (sha256 !== undefined) await checkSha256(reader, sha256, where);
      } catch (error) {
        await stored.remove();
        throw error;
      }
      await stored.setComplete(sha256);
      return reader;
    } catch (error) {
      if (error instanceof MissingFileError) await stored.remove(); // of a folder's files some are often not there
      throw error;
    } finally {
      await stored.close();
    }
  }
  const sink = new MemorySink();
  await fetchInto(sink, url, undefined, options, (version) => sink.expect(version.totalBytes));
  const reader = sink.reader(name);
  if (sha256 !== undefined) await checkSha256(reader, sha256, where);
  return reader;
}

/** Downloads into the cache; when the disk is full, other files are evicted. */
async function fetchIntoCache(stored: Stored, url: URL, options: DownloadOptions): Promise<void> {
  for (;;) {
    try {
      return await fetchInto(stored.sink, url, stored.version, options, (version) => stored.begin(version));
    } catch (error) {
      if ((error as Error)?.name !== "QuotaExceededError") throw error;
      if (!(await removeOldest())) throw new WhetError(`${options.where}: the browser's storage has no room for ${url.href}. Free some, or pass cache: false.`);
    }
  }
}

/** A reader that asks a server for no more than what is read; of other files as openReader. */
export async function openRanges(name: string, source: Source, options: DownloadOptions): Promise<Reader> {
  if (!isUrl(source) || !isRemote(urlOf(source))) return openReader(name, source, options);
  const { where, signal } = options;
  const ask = (how: RequestInit) =>
    fetch(source, { signal, ...how }).catch((error: Error) => {
      throw signal.aborted ? signal.reason : new WhetError(`${where}: ${source} could not be asked (${error.message}). Look at the URL and the network.`);
    });
  const get = async (offset: number, n: number) => {
    const response = await ask({ headers: { range: `bytes=${offset}-${offset + n - 1}` } });
    if (response.status !== 206) {
      await response.body?.cancel();
      throw new (errorFor(response))(`${where}: ${source} answered ${response.status} ${response.statusText} to a request of a range, expected 206. Correct the URL, or choose a server that knows ranges.`);
    }
    return { bytes: new Uint8Array(await response.arrayBuffer()), size: rangeTotal(response.headers) };
  };
  const size = (await get(0, 1)).size ?? versionOf((await ask({ method: "HEAD" })).headers).totalBytes;
  if (size === 0) throw new WhetError(`${where}: ${source} does not expose its size. Let its server send Access-Control-Expose-Headers: Content-Range.`);
  return { name, size, read: async (offset, n) => (await get(offset, n)).bytes };
}

/** Size of the whole file by Content-Range; undefined: a cross-origin server does not expose that header. */
function rangeTotal(headers: Headers): number | undefined {
  const found = /\/(\d+)$/.exec(headers.get("content-range") ?? "")?.[1];
  return found === undefined ? undefined : Number(found);
}

const errorFor = (response: Response) => (response.status === 404 ? MissingFileError : WhetError);

/** The file in the cache, if it is whole and what the server has now. Without a network it is taken as it is. */
async function fromCache(stored: Stored, url: URL, { where, signal, sha256 }: { where: string; signal: AbortSignal; sha256?: string }): Promise<Reader | undefined> {
  if (!stored.isComplete) return undefined;
  if (sha256 !== undefined && stored.sha256 === sha256.toLowerCase()) return stored.reuse(sha256);
  const now = await fetch(url, { method: "HEAD", signal }).catch((error) => {
    if (signal.aborted) throw error;
  });
  const isSame = now === undefined || !now.ok || isSameVersion(stored.version!, versionOf(now.headers));
  if (!isSame) {
    stored.sink.reset();
    return undefined;
  }
  if (sha256 !== undefined) await checkSha256(await stored.finish(), sha256, where); // the server has the same file
  return stored.reuse(sha256 ?? stored.sha256);
}

const isSameVersion = (a: Version, b: Version) => (a.etag !== null && b.etag !== null ? a.etag === b.etag : a.totalBytes === b.totalBytes);

function versionOf(headers: Headers): Version {
  const isEncoded = headers.has("content-encoding"); // its length is not the file's
  return { totalBytes: isEncoded ? 0 : Number(headers.get("content-length") ?? 0), etag: headers.get("etag") };
}

/** Fetches what the sink lacks, in several attempts. */
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
    // A download is resumed if the 206 response repeats its strong ETag, and not with a content-encoding, where ranges count
    // encoded bytes. Range needs no CORS preflight, as If-Range would. Old browsers send one for Range too: after two failures
    // the whole file is requested.
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
      if (BUSY.includes(response.status)) throw await busy(response);
      if (!response.ok || response.body === null) {
        throw new (errorFor(response))(`${where}: ${url.href} answered ${response.status} ${response.statusText}, expected the file. Correct the URL, or look at what its server says.`);
      }
      if (!isRest) {
        sink.reset();
        version = versionOf(response.headers);
        await begin(version);
      }
      const { totalBytes } = version!;
      for await (const bytes of chunksOf(response.body)) {
        sink.write(bytes);
        onProgress({ loadedBytes: sink.size, totalBytes, phase: "download" });
      }
      if (totalBytes === 0 || sink.size === totalBytes) return;
      throw new TypeError(`it ended after ${sink.size} of ${totalBytes} bytes`);
    } catch (error) {
      if (signal.aborted) throw signal.reason;
      if (error instanceof WhetError || (error as Error)?.name === "QuotaExceededError") throw error;
      if (sink.size > before) attempt = 1; // it goes on, if slowly
      const asked = error instanceof Busy ? error.pauseMs : 0;
      if (attempt >= ATTEMPTS || asked > LONGEST_PAUSE_MS) {
        const why = `${(error as Error)?.message ?? error}`;
        throw new WhetError(
          `${where}: ${url.href} could not be downloaded (${why}; ${sink.size} bytes came). Load it again when the network is there; of a server of another origin, see that it sends Access-Control-Allow-Origin.`,
        );
      }
      await pause(Math.max(asked, PAUSE_MS * 2 ** (attempt - 1)), signal);
    }
  }
}

/** A response that asks for another attempt later. */
class Busy extends Error {
  constructor(
    message: string,
    readonly pauseMs: number,
  ) {
    super(message);
  }
}

async function busy(response: Response): Promise<Busy> {
  await response.body?.cancel();
  const after = response.headers.get("retry-after") ?? ""; // seconds, or a date
  const ms = /^\d+$/.test(after) ? Number(after) * 1000 : Date.parse(after) - Date.now();
  return new Busy(`it answered ${response.status} ${response.statusText}${after && `, and to ask again after ${after}`}`, ms > 0 ? ms : 0);
}

/** Each is overwritten by the next, where the stream can read into a buffer. */
async function* chunksOf(body: ReadableStream<Uint8Array<ArrayBuffer>>): AsyncGenerator<Uint8Array> {
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
