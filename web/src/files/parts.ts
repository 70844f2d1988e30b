/** One reader over a model's files: a GGUF file, or the parts of a split file. */
import type { Core } from "../core/core.js";
import { WhetError } from "../core/errors.js";
import { type GgufFile, readGguf } from "./gguf.js";
import { closeAll, type DownloadOptions, type Reader } from "./reader.js";
import { type Files, openRanges, openReader } from "./sources.js";

/** Reader of the concatenated files, with its parts if there are several. */
export interface ModelReader extends Reader {
  parts?: { begin: number; reader: Reader }[];
}

const PART = /-(\d{5})-of-(\d{5})\.gguf$/;

/** Open a GGUF file or its parts. `headersOnly`: download only the ranges that are read. */
export async function openModel(files: Files, options: DownloadOptions, { headersOnly = false } = {}): Promise<ModelReader> {
  const sorted = files.length > 1 ? sortParts(files, options.where) : files;
  const readers: Reader[] = [];
  try {
    let isInPlace = false; // found in the first part, which has the architecture
    const isReadInPlace = (head: Uint8Array) => (isInPlace ||= options.isReadInPlace?.(head) === true);
    for (const [name, file] of sorted) readers.push(headersOnly ? await openRanges(name, file, options) : await openReader(name, file, { ...options, isReadInPlace }));
  } catch (error) {
    await closeAll(readers);
    throw error;
  }
  return readers.length === 1 ? readers[0] : join(readers);
}

/** Sort the parts by number and check that all are there. */
function sortParts(files: Files, where: string): Files {
  const numbered = files.map(([name, file]) => ({ name, file, match: PART.exec(name) }));
  const wrong = numbered.find(({ match }) => match === null);
  if (wrong !== undefined) {
    throw new WhetError(`${where}: source has ${files.length} files, including ${wrong.name}, expected the parts of one GGUF file, named ...-00001-of-0000N.gguf. Pass one file or all parts.`);
  }
  const n = Number(numbered[0].match![2]);
  const byNumber = new Map(numbered.map((each) => [Number(each.match![1]), each]));
  const missing = Array.from({ length: n }, (_, i) => i + 1).find((i) => !byNumber.has(i));
  if (missing !== undefined || byNumber.size !== n || files.length !== n) {
    throw new WhetError(`${where}: source has ${files.length} parts of ${n}; ${missing === undefined ? "one is repeated" : `part ${missing} is missing`}. Pass every part once.`);
  }
  return [...byNumber].sort(([a], [b]) => a - b).map(([, { name, file }]) => [name, file]);
}

/** Concatenate readers. */
export function join(readers: Reader[]): ModelReader {
  let size = 0;
  const parts = readers.map((reader) => {
    const begin = size;
    size += reader.size;
    return { begin, reader };
  });
  const findPart = (offset: number) => parts.findLast((part) => part.begin <= offset)!;
  return {
    name: readers[0].name,
    size,
    parts,
    read(offset, n, by) {
      const { begin, reader } = findPart(offset);
      return reader.read(offset - begin, n, by); // a tensor is within one part
    },
    stream(offset) {
      const { begin, reader } = findPart(offset);
      return reader.stream?.(offset - begin);
    },
    close: () => closeAll(readers),
  };
}

/** Return the first part's metadata and the tensors of all parts, with offsets into the concatenated files. */
export async function readHeaders(core: Core, model: ModelReader, where: string): Promise<GgufFile> {
  const files: GgufFile[] = [];
  for (const { begin, reader } of model.parts ?? [{ begin: 0, reader: model }]) {
    const file = await readGguf(core, reader, where);
    for (const tensor of file.tensors.values()) tensor.offset += begin;
    files.push(file);
  }
  const count = Number(files[0].metadata.get("split.count") ?? 1);
  if (count !== files.length) {
    throw new WhetError(`${where}: ${model.name} is one of ${count} parts, but source has ${files.length}. Pass all parts as an array.`);
  }
  return { metadata: files[0].metadata, tensors: new Map(files.flatMap((file) => [...file.tensors])) };
}
