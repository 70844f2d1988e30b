/** Downloaded files in the origin's private file system: each with a note of its URL, size, ETag, hash and last use. The
 * cache holds at most half of the origin's quota: the least recently used files are evicted. */
import type { Sink, Version } from "./download.js";
import { urlOf } from "./port.js";
import { ofBlob, type Reader } from "./sources.js";

const FOLDER = "whet-web";

interface Note {
  url: string;
  version: Version;
  isComplete: boolean;
  sha256?: string;
  usedMs?: number;
}

/** A synchronous handle; TypeScript's library has it for workers alone. */
interface SyncHandle {
  getSize(): number;
  write(bytes: Uint8Array, options: { at: number }): number;
  truncate(size: number): void;
  flush(): void;
  close(): void;
}

type Folder = FileSystemDirectoryHandle & { keys(): AsyncIterable<string> };

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

/** The key of a URL, without its fragment, which is never sent to a server. */
async function keyOf(url: URL): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(url.href.split("#")[0]));
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function readNote(directory: FileSystemDirectoryHandle, key: string): Promise<Note | undefined> {
  try {
    return JSON.parse(await (await (await directory.getFileHandle(`${key}.json`)).getFile()).text()) as Note;
  } catch {
    return undefined;
  }
}

/** The notes of all files, by key. */
async function readNotes(directory: Folder): Promise<[key: string, note: Note][]> {
  const found: [string, Note][] = [];
  for await (const name of directory.keys()) {
    if (!name.endsWith(".json")) continue;
    const key = name.slice(0, -5);
    const note = await readNote(directory, key);
    if (note !== undefined) found.push([key, note]);
  }
  return found;
}

const sizeOf = async (directory: Folder, key: string) => (await (await directory.getFileHandle(key)).getFile()).size;

/** Keys that this worker reads or writes, which it does not evict. */
const inUse = new Set<string>();

/** Evicts the least recently used file that this worker does not use; false: there is none. */
export async function removeOldest(): Promise<boolean> {
  const directory = await folder();
  if (directory === undefined) return false;
  const notes = (await readNotes(directory)).filter(([key]) => !inUse.has(key));
  for (const [key] of notes.sort(([, a], [, b]) => (a.usedMs ?? 0) - (b.usedMs ?? 0))) {
    if (await remove(directory, key)) return true;
  }
  return false;
}

/** False: another engine has the file open for writing. */
async function remove(directory: Folder, key: string): Promise<boolean> {
  try {
    await directory.removeEntry(key);
    await directory.removeEntry(`${key}.json`);
    return true;
  } catch {
    return false;
  }
}

/** Evicts until a file of this size fits into the bound; a single file may exceed it. */
async function makeRoom(directory: Folder, bytes: number): Promise<void> {
  const { quota = Infinity } = (await navigator.storage.estimate?.()) ?? {};
  const used = async () => {
    const sizes = await Promise.all((await readNotes(directory)).map(([key]) => sizeOf(directory, key).catch(() => 0)));
    return sizes.reduce((sum, size) => sum + size, 0);
  };
  while ((await used()) + bytes > quota / 2) if (!(await removeOldest())) return;
}

/** One file of the cache, open for writing until it is complete. */
export class Stored {
  private handle: SyncHandle | undefined;

  constructor(
    private readonly directory: Folder,
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

  /** Called before the first byte: a download is resumed only if the server still has this version. */
  async begin(version: Version): Promise<void> {
    await makeRoom(this.directory, version.totalBytes);
    await this.write(version, false);
  }

  async setComplete(sha256: string | undefined): Promise<void> {
    const size = (await this.file.getFile()).size;
    await this.write({ totalBytes: size, etag: this.note?.version.etag ?? null }, true, sha256?.toLowerCase());
  }

  /** A reader of the complete file, whose last use is now. */
  async reuse(sha256: string | undefined): Promise<Reader> {
    await this.setComplete(sha256);
    return this.finish();
  }

  private async write(version: Version, isComplete: boolean, sha256?: string): Promise<void> {
    const note: Note = { url: this.note?.url ?? this.url.href, version, isComplete, sha256, usedMs: Date.now() };
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

/** The file of a URL, or a complete file with this hash, whatever its URL was (signed URLs change); undefined: there is no
 * such file system, or another engine writes this file. */
export async function openCache(url: URL, sha256: string | undefined): Promise<Stored | undefined> {
  const directory = await folder();
  if (directory === undefined) return undefined;
  const isSought = ([, note]: [string, Note]) => note.isComplete && note.sha256 === sha256?.toLowerCase();
  const key = (sha256 !== undefined && (await readNotes(directory)).find(isSought)?.[0]) || (await keyOf(url));
  inUse.add(key);
  try {
    const file = (await directory.getFileHandle(key, { create: true })) as FileSystemFileHandle & { createSyncAccessHandle(): Promise<SyncHandle> };
    return new Stored(directory, key, url, file, await openHandle(file), await readNote(directory, key));
  } catch {
    return undefined;
  }
}

/** URLs and bytes of what is cached. */
export async function listCache(): Promise<{ url: string; sizeBytes: number; isComplete: boolean }[]> {
  const directory = await folder();
  if (directory === undefined) return [];
  return Promise.all((await readNotes(directory)).map(async ([key, { url, isComplete }]) => ({ url, sizeBytes: await sizeOf(directory, key), isComplete })));
}

/** Removes a URL's file from the cache; all of them without a URL. */
export async function clearCache(url?: string | URL): Promise<void> {
  const directory = await folder();
  if (directory === undefined) return;
  const key = url === undefined ? undefined : await keyOf(urlOf(url));
  const names: string[] = [];
  for await (const name of directory.keys()) if (key === undefined || name.startsWith(key)) names.push(name);
  for (const name of names) await directory.removeEntry(name);
}
