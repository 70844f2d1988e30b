/** Readers of files: random access by ranges, so that a file is never in memory as a whole. */
import { sha256 } from "@noble/hashes/sha2.js";
import { bytesToHex } from "@noble/hashes/utils.js";
import { WhetError } from "../core/errors.js";

/** Who reads: the prefix of error messages, and what ends the reading. */
export interface Caller {
  where: string;
  signal: AbortSignal;
}

export interface Reader {
  name: string;
  size: number;
  /** Read a range. `by`: default: who opened the file. */
  read(offset: number, n: number, by?: Caller): Promise<Uint8Array>;
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

export interface FileOptions {
  /** SHA-256 of the file, or of each file by name: 64 hexadecimal digits. A cached file with this hash is not requested again. */
  sha256?: string | Readonly<Record<string, string>>;
  /** Cache downloads in the browser's private file system. Default: true. */
  cache?: boolean;
}

/** `where` is the public function. */
export interface DownloadOptions extends FileOptions, Caller {
  onProgress(progress: Progress): void;
  /** Whether a file, by its first bytes, is read by ranges where it is, if there is no cache to download it to. */
  isReadInPlace?(head: Uint8Array): boolean;
}

export async function closeAll(readers: readonly Reader[]): Promise<void> {
  for (const reader of readers) await reader.close?.();
}

export function wrapBytes(bytes: Uint8Array, name: string): Reader {
  return { name, size: bytes.length, read: async (offset, n) => bytes.subarray(offset, offset + n) };
}

export function wrapBlob(blob: Blob, name: string): Reader {
  return {
    name,
    size: blob.size,
    async read(offset, n, by) {
      const label = by === undefined ? name : `${by.where}: ${name}`;
      const bytes = await blob.slice(offset, offset + n).arrayBuffer().catch((error: Error) => {
        throw new WhetError(`${label}: bytes ${offset} to ${offset + n - 1} cannot be read (${error.message}). The file was changed or removed: load it again.`);
      });
      if (bytes.byteLength < n) throw truncated(label, offset + bytes.byteLength, offset + n);
      return new Uint8Array(bytes);
    },
    stream: (offset) => blob.slice(offset).stream(),
  };
}

/** Error of a file that ends early. */
export const truncated = (name: string, at: number, end: number) => new WhetError(`${name} ends at byte ${at}, expected ${end} bytes. It was truncated while it was read: load it again.`);

/** Byte range of a file. */
export interface Range {
  begin: number;
  end: number;
}

const SKIPPED_BYTES = 1 << 16; // between ranges, such as the padding of tensors: a stream of a server is not opened again

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
      while (stream !== undefined && at < begin && begin - at <= SKIPPED_BYTES) {
        const { value } = await stream.read(new Uint8Array(begin - at));
        if (!value?.length) break; // the range is in the next part of a split file
        at += value.length;
      }
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
        if (!value?.length) throw truncated(`Engine.load: ${reader.name}`, at, end);
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
