/** Model sources: URLs, Files, bytes and paths, opened as readers. */
import { MissingFileError, show, WhetError } from "../core/errors.js";
import { nodeModule, urlOf } from "../core/port.js";
import { download, openRemoteRanges } from "./download.js";
import { checkSha256, type DownloadOptions, type Reader, truncated, wrapBlob, wrapBytes } from "./reader.js";

/** One file. */
export type Source = string | URL | Blob | ArrayBuffer | SharedArrayBuffer | Uint8Array;
/** One or several files: the parts of a split GGUF file, an input's FileList, or a folder's files by name. */
export type Sources = Source | readonly Source[] | ArrayLike<Blob> | { readonly files: Readonly<Record<string, Source>> };

/** Files of a model by name. */
export type Files = [name: string, file: Source][];

/** Return the base name of a source: "model.gguf". */
function nameOf(source: Source): string {
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

const isRemote = ({ protocol }: URL) => protocol !== "file:" && protocol !== "blob:" && protocol !== "data:";

/** Return a source as [name, file] entries, with absolute URLs as strings. */
export function listFiles(sources: Sources, where: string): Files {
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

/** Open one file. Of URLs on a server, only the ranges that are read are downloaded. */
export async function openRanges(name: string, source: Source, options: DownloadOptions): Promise<Reader> {
  return isUrl(source) && isRemote(urlOf(source)) ? openRemoteRanges(urlOf(source), name, options) : openReader(name, source, options);
}

const isUrl = (source: Source): source is string | URL => typeof source === "string" || source instanceof URL;

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

async function openFile(url: URL, where: string): Promise<Reader> {
  const { open } = nodeModule("node:fs/promises");
  const path = nodeModule("node:url").fileURLToPath(url);
  const file = await open(url).catch((error: NodeJS.ErrnoException) => {
    throw new (error.code === "ENOENT" ? MissingFileError : WhetError)(`${where}: ${path} cannot be read (${error.message}). Pass the path of a model file.`);
  });
  const { size, mtimeMs } = await file.stat();
  return {
    name: path,
    size,
    async read(offset, n, by) {
      const label = `${by?.where ?? where}: ${path}`;
      const bytes = new Uint8Array(n);
      for (let done = 0; done < n; ) {
        const { bytesRead } = await file.read(bytes, done, n - done, offset + done);
        if (bytesRead === 0) throw truncated(label, offset + done, offset + n);
        done += bytesRead;
      }
      if ((await file.stat()).mtimeMs !== mtimeMs) throw new WhetError(`${label} was changed after it was opened: bytes ${offset} to ${offset + n - 1} may be another model's. Load it again.`);
      return bytes;
    },
    close: () => file.close(),
  };
}

/** Check digests before a download. */
export function checkDigests(given: DownloadOptions["sha256"], where: string): void {
  for (const each of typeof given === "object" && given !== null ? Object.values(given) : [given]) {
    const isDigest = each === undefined || (typeof each === "string" && /^[0-9a-f]{64}$/i.test(each));
    if (!isDigest) throw new WhetError(`${where}: sha256 is ${show(each)}, expected 64 hexadecimal digits.`);
  }
}

