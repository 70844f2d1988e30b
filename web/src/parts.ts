/** The files of one model as one reader: a GGUF file, or the parts of one that was split. */
import type { Core } from "./core.js";
import { WhetError } from "./errors.js";
import { type GgufFile, readGguf } from "./gguf.js";
import { type DownloadOptions, openRanges } from "./download.js";
import type { Files } from "./protocol.js";
import { openReader, type Reader } from "./sources.js";

/** The whole, and its files where there are several. */
export interface ModelReader extends Reader {
  parts?: { begin: number; reader: Reader }[];
}

const PART = /-(\d{5})-of-(\d{5})\.gguf$/;

/** `headsOnly`: of URLs nothing is downloaded but what is read. */
export async function openModel(files: Files, options: DownloadOptions, { headsOnly = false } = {}): Promise<ModelReader> {
  const sorted = files.length > 1 ? inOrder(files, options.where) : files;
  const readers: Reader[] = [];
  try {
    for (const [name, file] of sorted) readers.push(headsOnly ? await openRanges(name, file, options) : await openReader(name, file, options));
  } catch (error) {
    for (const reader of readers) await reader.close?.();
    throw error;
  }
  return readers.length === 1 ? readers[0] : join(readers);
}

/** Parts by their numbers, all of them. */
function inOrder(files: Files, where: string): Files {
  const numbered = files.map(([name, file]) => ({ name, file, match: PART.exec(name) }));
  const wrong = numbered.find(({ match }) => match === null);
  if (wrong !== undefined) {
    throw new WhetError(`${where}: source has ${files.length} files, among them ${wrong.name}, expected the parts of one GGUF file, named ...-00001-of-0000N.gguf. Give one file, or all parts.`);
  }
  const n = Number(numbered[0].match![2]);
  const byNumber = new Map(numbered.map((each) => [Number(each.match![1]), each]));
  const missing = Array.from({ length: n }, (_, i) => i + 1).find((i) => !byNumber.has(i));
  if (missing !== undefined || byNumber.size !== n || files.length !== n) {
    throw new WhetError(`${where}: source has ${files.length} parts of ${n}, and ${missing === undefined ? "one twice" : `part ${missing} is missing`}. Give every part once.`);
  }
  return [...byNumber].sort(([a], [b]) => a - b).map(([, { name, file }]) => [name, file]);
}

/** One file after the other. */
export function join(readers: Reader[]): ModelReader {
  let size = 0;
  const parts = readers.map((reader) => {
    const begin = size;
    size += reader.size;
    return { begin, reader };
  });
  const partOf = (offset: number) => parts.findLast((part) => part.begin <= offset)!;
  return {
    name: readers[0].name,
    size,
    parts,
    read(offset, n) {
      const { begin, reader } = partOf(offset);
      return reader.read(offset - begin, n); // a tensor lies in one part
    },
    stream(offset) {
      const { begin, reader } = partOf(offset);
      return reader.stream?.(offset - begin);
    },
    async close() {
      for (const reader of readers) await reader.close?.();
    },
  };
}

/** The metadata of the first part, and the tensors of all, at their places in the whole. */
export async function readHeads(core: Core, model: ModelReader, where: string): Promise<GgufFile> {
  const files: GgufFile[] = [];
  for (const { begin, reader } of model.parts ?? [{ begin: 0, reader: model }]) {
    const file = await readGguf(core, reader, where);
    for (const tensor of file.tensors.values()) tensor.offset += begin;
    files.push(file);
  }
  const count = Number(files[0].metadata.get("split.count") ?? 1);
  if (count !== files.length) {
    throw new WhetError(`${where}: ${model.name} is one of ${count} parts, and ${files.length} came. Give all parts, as an array.`);
  }
  return { metadata: files[0].metadata, tensors: new Map(files.flatMap((file) => [...file.tensors])) };
}
