/** Downloaded files in the origin's private file system: each with a note of its URL, size, ETag and hash. */
import type { Sink, Version } from "./download.js";
import { ofBlob, type Reader } from "./sources.js";

const FOLDER = "whet-web";

interface Note {
  url: string;
  version: Version;
  isComplete: boolean;
  sha256?: string;
}

/** A synchronous handle; TypeScript's library has it for workers alone. */
interface SyncHandle {
  getSize(): number;
  write(bytes: Uint8Array, options: { at: number }): number;
  truncate(size: number): void;
  flush(): void;
  close(): void;
}

async function folder(): Promise<FileSystemDirectoryHandle | undefined> {
  try {
    const root = await navigator.storage.getDirectory();
    return await root.getDirectoryHandle(FOLDER, { create: true });
  } catch {
    return undefined; // not a browser, a page without a secure origin, or a private window
  }
}

const ATTEMPTS = 40;
const PAUSE_MS = 25;

/** Firefox frees a file some time after it was closed or read. */
async function openHandle(file: { createSyncAccessHandle(): Promise<SyncHandle> }): Promise<SyncHandle> {
  for (let attempt = 1; ; ++attempt) {
    try {
      return await file.createSyncAccessHandle();
    } catch (error) {
      if ((error as Error)?.name !== "NoModificationAllowedError" || attempt >= ATTEMPTS) throw error;
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  }
}

async function keyOf(url: URL): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(url.href));
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function readNote(directory: FileSystemDirectoryHandle, key: string): Promise<Note | undefined> {
  try {
    return JSON.parse(await (await (await directory.getFileHandle(`${key}.json`)).getFile()).text()) as Note;
  } catch {
    return undefined;
  }
}

/** One file of the cache, open for writing until it is complete. */
export class Stored {
  private handle: SyncHandle | undefined;

  constructor(
    private readonly directory: FileSystemDirectoryHandle,
    private readonly key: string,
    private readonly url: URL,
    private readonly file: FileSystemFileHandle,
    handle: SyncHandle,
    private note: Note | undefined,
  ) {
    this.handle = handle;
  }

  get isComplete(): boolean {
    return this.note?.isComplete === true && this.handle!.getSize() === this.note.version.totalBytes;
  }

  get sha256(): string | undefined {
    return this.note?.sha256;
  }

  get version(): Version | undefined {
    return this.note?.version;
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

  /** Written before the first byte: an interrupted download is gone on with only if it is of this version. */
  async setVersion(version: Version): Promise<void> {
    await this.write({ url: this.url.href, version, isComplete: false });
  }

  async setComplete(sha256: string | undefined): Promise<void> {
    const size = (await this.file.getFile()).size;
    await this.write({ url: this.url.href, version: { totalBytes: size, etag: this.note?.version.etag ?? null }, isComplete: true, sha256: sha256?.toLowerCase() });
  }

  private async write(note: Note): Promise<void> {
    this.note = note;
    const file = (await this.directory.getFileHandle(`${this.key}.json`, { create: true })) as FileSystemFileHandle & { createSyncAccessHandle(): Promise<SyncHandle> };
    const handle = await openHandle(file);
    try {
      handle.truncate(0);
      handle.write(new TextEncoder().encode(JSON.stringify(note)), { at: 0 });
    } finally {
      handle.close();
    }
  }

  /** A reader of the file, which other engines may read too. */
  async finish(): Promise<Reader> {
    await this.close();
    return ofBlob(await this.file.getFile(), this.url.href);
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

/** The place of a URL's file; undefined where there is no such file system, or another engine writes this file. */
export async function openCache(url: URL): Promise<Stored | undefined> {
  const directory = await folder();
  if (directory === undefined) return undefined;
  const key = await keyOf(url);
  try {
    const file = (await directory.getFileHandle(key, { create: true })) as FileSystemFileHandle & { createSyncAccessHandle(): Promise<SyncHandle> };
    return new Stored(directory, key, url, file, await openHandle(file), await readNote(directory, key));
  } catch {
    return undefined;
  }
}

/** URLs and bytes of what is cached. */
export async function listCache(): Promise<{ url: string; sizeBytes: number; isComplete: boolean }[]> {
  const directory = (await folder()) as (FileSystemDirectoryHandle & { keys(): AsyncIterable<string> }) | undefined;
  const found: { url: string; sizeBytes: number; isComplete: boolean }[] = [];
  if (directory === undefined) return found;
  for await (const name of directory.keys()) {
    if (!name.endsWith(".json")) continue;
    const note = await readNote(directory, name.slice(0, -5));
    if (note === undefined) continue;
    const file = await (await directory.getFileHandle(name.slice(0, -5))).getFile();
    found.push({ url: note.url, sizeBytes: file.size, isComplete: note.isComplete });
  }
  return found;
}

/** Removes a URL's file from the cache; all of them without a URL. */
export async function clearCache(url?: string | URL): Promise<void> {
  const directory = (await folder()) as (FileSystemDirectoryHandle & { keys(): AsyncIterable<string> }) | undefined;
  if (directory === undefined) return;
  const key = url === undefined ? undefined : await keyOf(new URL(url, globalThis.location?.href));
  const names: string[] = [];
  for await (const name of directory.keys()) if (key === undefined || name.startsWith(key)) names.push(name);
  for (const name of names) await directory.removeEntry(name);
}
