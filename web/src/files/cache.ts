/** Download cache in the origin's private file system. Each file has a JSON record of its URL, size, ETag, hash and last
 * use. The cache takes at most half of the origin's quota and evicts the least recently used files. */
import { urlOf } from "../core/port.js";
import { type Reader, wrapBlob } from "./reader.js";

const FOLDER = "whet-web";

/** Append-only destination of a download. */
export interface Sink {
  readonly size: number;
  write(bytes: Uint8Array): void;
  reset(): void;
}

/** Version of a file on its server. */
export interface Version {
  totalBytes: number;
  etag: string | null;
}

interface FileRecord {
  url: string;
  version: Version;
  isComplete: boolean;
  sha256?: string;
  usedMs?: number;
}

/** FileSystemSyncAccessHandle, which TypeScript declares only for workers. */
interface SyncHandle {
  getSize(): number;
  write(bytes: Uint8Array, options: { at: number }): number;
  truncate(size: number): void;
  flush(): void;
  close(): void;
}

interface WritableFile extends FileSystemFileHandle {
  createSyncAccessHandle(): Promise<SyncHandle>;
}

interface Folder extends FileSystemDirectoryHandle {
  keys(): AsyncIterable<string>;
  getFileHandle(name: string, options?: FileSystemGetFileOptions): Promise<WritableFile>;
}

async function folder(): Promise<Folder | undefined> {
  try {
    const root = await navigator.storage.getDirectory();
    return (await root.getDirectoryHandle(FOLDER, { create: true })) as Folder;
  } catch {
    return undefined; // not a browser, a page without a secure origin, or a private window
  }
}

const ATTEMPTS = 40;
const PAUSE_MS = 25;

/** Open a file for writing, with retries: Firefox releases its lock some time after a close or a read. */
async function openHandle(file: WritableFile): Promise<SyncHandle> {
  for (let attempt = 1; ; ++attempt) {
    try {
      return await file.createSyncAccessHandle();
    } catch (error) {
      if ((error as Error)?.name !== "NoModificationAllowedError" || attempt >= ATTEMPTS) throw error;
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  }
}

/** Return the cache key of a URL without its fragment, which servers never receive. */
async function keyOf(url: URL): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(url.href.split("#")[0]));
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function readRecord(directory: FileSystemDirectoryHandle, key: string): Promise<FileRecord | undefined> {
  try {
    return JSON.parse(await (await (await directory.getFileHandle(`${key}.json`)).getFile()).text()) as FileRecord;
  } catch {
    return undefined;
  }
}

/** Return the records of all files. */
async function readRecords(directory: Folder): Promise<[key: string, record: FileRecord][]> {
  const found: [string, FileRecord][] = [];
  for await (const name of directory.keys()) {
    if (!name.endsWith(".json")) continue;
    const key = name.slice(0, -5);
    const record = await readRecord(directory, key);
    if (record !== undefined) found.push([key, record]);
  }
  return found;
}

const sizeOf = async (directory: Folder, key: string) => (await (await directory.getFileHandle(key)).getFile()).size;

/** Keys that this worker reads or writes and therefore does not evict. */
const inUse = new Set<string>();

/** Evict the least recently used file that this worker does not use. Return false if there is none. */
export async function evictOldest(): Promise<boolean> {
  const directory = await folder();
  if (directory === undefined) return false;
  const records = (await readRecords(directory)).filter(([key]) => !inUse.has(key));
  for (const [key] of records.sort(([, a], [, b]) => (a.usedMs ?? 0) - (b.usedMs ?? 0))) {
    if (await remove(directory, key)) return true;
  }
  return false;
}

/** Remove a file and its record. Return false if another engine has the file open for writing. */
async function remove(directory: Folder, key: string): Promise<boolean> {
  try {
    await directory.removeEntry(key);
    await directory.removeEntry(`${key}.json`);
    return true;
  } catch {
    return false;
  }
}

/** Evict until a file of this size fits into half of the quota, which a single file may exceed. */
async function reserveSpace(directory: Folder, bytes: number): Promise<void> {
  const { quota = Infinity } = (await navigator.storage.estimate?.()) ?? {};
  const used = async () => {
    const sizes = await Promise.all((await readRecords(directory)).map(([key]) => sizeOf(directory, key).catch(() => 0)));
    return sizes.reduce((sum, size) => sum + size, 0);
  };
  while ((await used()) + bytes > quota / 2) if (!(await evictOldest())) return;
}

/** A cached file, open for writing until it is complete. */
export class CacheEntry {
  constructor(
    private readonly directory: Folder,
    private readonly key: string,
    private readonly url: URL,
    private readonly file: FileSystemFileHandle,
    private handle: SyncHandle | undefined,
    private record: FileRecord | undefined,
  ) {}

  get isComplete(): boolean {
    return this.record?.isComplete === true && this.handle!.getSize() === this.record.version.totalBytes;
  }

  get sha256(): string | undefined {
    return this.record?.sha256;
  }

  get version(): Version | undefined {
    return this.record?.version;
  }

  get sink(): Sink {
    const handle = this.handle!;
    return {
      get size() {
        return handle.getSize();
      },
      write(bytes) {
        if (handle.write(bytes, { at: handle.getSize() }) < bytes.length) throw new DOMException("the disk is full", "QuotaExceededError");
      },
      reset: () => handle.truncate(0),
    };
  }

  /** Record the version before the first byte: a download is resumed only while the server has the same version. */
  async begin(version: Version): Promise<void> {
    await reserveSpace(this.directory, version.totalBytes);
    await this.write(version, false);
  }

  async markComplete(sha256: string | undefined): Promise<void> {
    const size = (await this.file.getFile()).size;
    await this.write({ totalBytes: size, etag: this.record?.version.etag ?? null }, true, sha256?.toLowerCase());
  }

  /** Update the last use and return a reader of the complete file. */
  async reuse(sha256: string | undefined): Promise<Reader> {
    await this.markComplete(sha256);
    return this.finish();
  }

  private async write(version: Version, isComplete: boolean, sha256?: string): Promise<void> {
    const record: FileRecord = { url: this.record?.url ?? this.url.href, version, isComplete, sha256, usedMs: Date.now() };
    this.record = record;
    const handle = await openHandle(await this.directory.getFileHandle(`${this.key}.json`, { create: true }));
    try {
      handle.truncate(0);
      handle.write(new TextEncoder().encode(JSON.stringify(record)), { at: 0 });
    } finally {
      handle.close();
    }
  }

  /** Close the handle and return a reader; other engines may read the file as well. */
  async finish(): Promise<Reader> {
    await this.close();
    return wrapBlob(await this.file.getFile(), this.url.href);
  }

  async close(): Promise<void> {
    this.handle?.flush();
    this.handle?.close();
    this.handle = undefined;
  }

  async remove(): Promise<void> {
    await this.close();
    for (const name of [this.key, `${this.key}.json`]) await this.directory.removeEntry(name).catch(() => {});
  }
}

/** Open the entry of a URL, or a complete entry with this hash under any URL (signed URLs change). Return undefined if the
 * runtime has no such file system or another engine is writing the file. */
export async function openEntry(url: URL, sha256: string | undefined): Promise<CacheEntry | undefined> {
  const directory = await folder();
  if (directory === undefined) return undefined;
  const hasHash = ([, record]: [string, FileRecord]) => record.isComplete && record.sha256 === sha256?.toLowerCase();
  const key = (sha256 !== undefined && (await readRecords(directory)).find(hasHash)?.[0]) || (await keyOf(url));
  inUse.add(key);
  try {
    const file = await directory.getFileHandle(key, { create: true });
    return new CacheEntry(directory, key, url, file, await openHandle(file), await readRecord(directory, key));
  } catch {
    return undefined;
  }
}

/** List the cached files: URL, size and whether the download is complete. */
export async function listCache(): Promise<{ url: string; sizeBytes: number; isComplete: boolean }[]> {
  const directory = await folder();
  if (directory === undefined) return [];
  return Promise.all((await readRecords(directory)).map(async ([key, { url, isComplete }]) => ({ url, sizeBytes: await sizeOf(directory, key), isComplete })));
}

/** Remove a URL's file from the cache; without a URL, all files. */
export async function clearCache(url?: string | URL): Promise<void> {
  const directory = await folder();
  if (directory === undefined) return;
  const key = url === undefined ? undefined : await keyOf(urlOf(url));
  const names: string[] = [];
  for await (const name of directory.keys()) if (key === undefined || name.startsWith(key)) names.push(name);
  for (const name of names) await directory.removeEntry(name);
}
