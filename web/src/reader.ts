/** Where a model's bytes come from: read in ranges, so that the file and its packed weights are not in memory both. */
import { WhetError } from "./errors.js";

export interface Reader {
  name: string;
  size: number;
  read(offset: number, n: number): Promise<Uint8Array>;
  close?(): Promise<void>;
}

export type Source = string | URL | Blob | ArrayBuffer | SharedArrayBuffer | Uint8Array;
export type Progress = (progress: { loadedBytes: number; totalBytes: number }) => void;

export async function openReader(source: Source, progress: Progress, signal: AbortSignal): Promise<Reader> {
  if (source instanceof Uint8Array) return ofBytes(source, "bytes");
  if (source instanceof ArrayBuffer) return ofBytes(new Uint8Array(source), "bytes");
  if (typeof SharedArrayBuffer !== "undefined" && source instanceof SharedArrayBuffer) return ofBytes(new Uint8Array(source), "bytes");
  if (source instanceof Blob) {
    return {
      name: "name" in source ? String(source.name) : "Blob",
      size: source.size,
      read: async (offset, n) => new Uint8Array(await source.slice(offset, offset + n).arrayBuffer()),
    };
  }
  const url = new URL(source as string | URL, globalThis.location?.href);
  return url.protocol === "file:" ? ofFile(url) : ofBytes(await download(url, progress, signal), url.href);
}

function ofBytes(bytes: Uint8Array, name: string): Reader {
  return { name, size: bytes.length, read: async (offset, n) => bytes.subarray(offset, offset + n) };
}

async function ofFile(url: URL): Promise<Reader> {
  const { open } = await import("node:fs/promises");
  const file = await open(url);
  return {
    name: url.pathname,
    size: (await file.stat()).size,
    read: async (offset, n) => {
      const bytes = new Uint8Array(n);
      for (let done = 0; done < n; ) {
        const { bytesRead } = await file.read(bytes, done, n - done, offset + done);
        if (bytesRead === 0) throw new WhetError(`Engine.load: ${url.pathname} ends at byte ${offset + done}. It was cut while it was read.`);
        done += bytesRead;
      }
      return bytes;
    },
    close: () => file.close(),
  };
}

async function download(url: URL, progress: Progress, signal: AbortSignal): Promise<Uint8Array> {
  const response = await fetch(url, { signal });
  if (!response.ok || response.body === null) {
    throw new WhetError(`Engine.load: ${url.href} answered ${response.status} ${response.statusText}, expected a model file.`);
  }
  const totalBytes = Number(response.headers.get("content-length") ?? 0);
  let bytes = new Uint8Array(totalBytes || 1 << 20);
  let loadedBytes = 0;
  for (const stream = response.body.getReader(); ; ) {
    const { done, value } = await stream.read();
    if (done) break;
    if (loadedBytes + value.length > bytes.length) {
      const longer = new Uint8Array(Math.max(2 * bytes.length, loadedBytes + value.length));
      longer.set(bytes);
      bytes = longer;
    }
    bytes.set(value, loadedBytes);
    loadedBytes += value.length;
    progress({ loadedBytes, totalBytes });
  }
  if (totalBytes > 0 && loadedBytes < totalBytes && !response.headers.has("content-encoding")) {
    throw new WhetError(`Engine.load: ${url.href} ended after ${loadedBytes} of ${totalBytes} bytes. Load it again.`);
  }
  return bytes.subarray(0, loadedBytes);
}
