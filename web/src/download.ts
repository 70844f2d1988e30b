/** Downloads that go on where they were cut, into the origin's private file system where there is one, else into memory. */
import { MissingFileError, WhetError } from "./errors.js";
import { openCache, type Stored } from "./cache.js";
import { byteReader, checkSha256, isUrl, ofBytes, openReader, type Progress, type Reader, type Source } from "./sources.js";

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
  const stored = options.cache === false ? undefined : await openCache(url);
  if (stored !== undefined) {
    const found = await fromCache(stored, url, options);
    if (found !== undefined) return found;
    try {
      await fetchInto(stored.sink, url, stored.version, options, (version) => stored.setVersion(version));
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

/** A reader that asks a server for no more than what is read; of other files as openReader. */
export async function openRanges(name: string, source: Source, options: DownloadOptions): Promise<Reader> {
  if (!isUrl(source) || new URL(source).protocol === "file:") return openReader(name, source, options);
  const { where, signal } = options;
  const get = async (offset: number, n: number) => {
    const response = await fetch(source, { signal, headers: { range: `bytes=${offset}-${offset + n - 1}` } }).catch((error: Error) => {
      throw signal.aborted ? signal.reason : new WhetError(`${where}: ${source} could not be asked (${error.message}). Look at the URL and the network.`);
    });
    if (response.status !== 206) {
      await response.body?.cancel();
      throw new (errorFor(response))(`${where}: ${source} answered ${response.status} ${response.statusText} to a request of a range, expected 206. Correct the URL, or choose a server that knows ranges.`);
    }
    return { bytes: new Uint8Array(await response.arrayBuffer()), size: versionOf(response.headers).totalBytes };
  };
  const { size } = await get(0, 1);
  return { name, size, read: async (offset, n) => (await get(offset, n)).bytes };
}

const errorFor = (response: Response) => (response.status === 404 ? MissingFileError : WhetError);

/** The file in the cache, if it is whole and what the server has now. Without a network it is taken as it is. */
async function fromCache(stored: Stored, url: URL, { signal, sha256 }: { signal: AbortSignal; sha256?: string }): Promise<Reader | undefined> {
  if (!stored.isComplete) return undefined;
  if (sha256 !== undefined && stored.sha256 === sha256.toLowerCase()) return stored.finish();
  const now = await fetch(url, { method: "HEAD", signal }).catch((error) => {
    if (signal.aborted) throw error;
  });
  const isSame = now === undefined || !now.ok || isSameVersion(stored.version!, versionOf(now.headers));
  if (isSame && sha256 === undefined) return stored.finish();
  stored.sink.reset();
  return undefined;
}

const isSameVersion = (a: Version, b: Version) => (a.etag !== null && b.etag !== null ? a.etag === b.etag : a.totalBytes === b.totalBytes);

function versionOf(headers: Headers): Version {
  const isEncoded = headers.has("content-encoding"); // its length is not the file's
  const range = /\/(\d+)$/.exec(headers.get("content-range") ?? "");
  return { totalBytes: Number(range?.[1] ?? (isEncoded ? 0 : (headers.get("content-length") ?? 0))), etag: headers.get("etag") };
}

/** Fetches what the sink lacks, in several attempts. */
async function fetchInto(
  sink: Sink,
  url: URL,
  known: Version | undefined,
  { where, signal, onProgress }: DownloadOptions,
  begin: (version: Version) => void,
): Promise<void> {
  let version = known;
  for (let attempt = 1; ; ++attempt) {
    const before = sink.size;
    try {
      // Going on is safe where the server tells that it is the same file.
      if (sink.size > 0 && !version?.etag) sink.reset();
      const headers: Record<string, string> = sink.size > 0 ? { range: `bytes=${sink.size}-`, "if-range": version!.etag! } : {};
      const response = await fetch(url, { signal, headers });
      if (response.status === 416 && sink.size > 0) {
        sink.reset();
        continue;
      }
      if (!response.ok || response.body === null) {
        throw new (errorFor(response))(`${where}: ${url.href} answered ${response.status} ${response.statusText}, expected the file. Correct the URL, or look at what its server says.`);
      }
      const now = versionOf(response.headers);
      if (response.status !== 206 || (version?.etag && now.etag !== version.etag)) sink.reset();
      version = now;
      begin(version);
      for await (const bytes of chunksOf(response.body)) {
        sink.write(bytes);
        onProgress({ loadedBytes: sink.size, totalBytes: version.totalBytes, phase: "download" });
      }
      if (version.totalBytes === 0 || sink.size === version.totalBytes) return;
      throw new TypeError(`it ended after ${sink.size} of ${version.totalBytes} bytes`);
    } catch (error) {
      if (signal.aborted) throw signal.reason;
      if (error instanceof WhetError || (error as Error)?.name === "QuotaExceededError") throw error;
      if (sink.size > before) attempt = 1; // it goes on, if slowly
      if (attempt >= ATTEMPTS) {
        const why = `${(error as Error)?.message ?? error}`;
        throw new WhetError(
          `${where}: ${url.href} could not be downloaded (${why}; ${sink.size} bytes came). Load it again when the network is there; of a server of another origin, see that it sends Access-Control-Allow-Origin.`,
        );
      }
      await pause(PAUSE_MS * 2 ** (attempt - 1), signal);
    }
  }
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
