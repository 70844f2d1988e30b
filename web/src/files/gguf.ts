/** Metadata and tensors of GGUF files; the core parses the header. */
import type { Core } from "../core/core.js";
import { WhetError } from "../core/errors.js";
import { byName, readHeader, type Tensor } from "./headers.js";
import type { Reader } from "./reader.js";
import { decode, readTexts } from "./utf8.js";

export type Value = number | bigint | boolean | string | Value[] | null;

export interface GgufFile {
  metadata: Map<string, Value>;
  tensors: Map<string, Tensor>;
}

/** Value of a key, as in the core's JSON: its type by GGUF's numbers and its bytes in the header. */
interface Entry {
  key: string;
  type: number;
  itemType: number;
  count: number;
  offset: number;
  sizeBytes: number;
}

export async function readGguf(core: Core, reader: Reader, where: string): Promise<GgufFile> {
  const toError = (why: string) => new WhetError(`${where}: ${reader.name}: ${why}`);
  const { header, found } = await readHeader<{ metadata: Entry[]; tensors: Tensor[] }>(core, "parse_gguf", reader, toError);
  return { metadata: new Map(found.metadata.map((entry) => [entry.key, readValue(header, entry)])), tensors: byName(found.tensors) };
}

const STRING = 8;
const ARRAY = 9;
const SIZES = [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8];

function readValue(header: Uint8Array, { type, itemType, count, offset, sizeBytes }: Entry): Value {
  const view = new DataView(header.buffer, header.byteOffset, header.byteLength);
  const text = (at: number, n: number) => decode(header.subarray(at, at + n));
  const number = (kind: number, at: number): Value => {
    switch (kind) {
      case 0: return view.getUint8(at);
      case 1: return view.getInt8(at);
      case 2: return view.getUint16(at, true);
      case 3: return view.getInt16(at, true);
      case 4: return view.getUint32(at, true);
      case 5: return view.getInt32(at, true);
      case 6: return view.getFloat32(at, true);
      case 7: return view.getUint8(at) !== 0;
      case 10: return Number(view.getBigUint64(at, true));
      case 11: return Number(view.getBigInt64(at, true));
      default: return view.getFloat64(at, true);
    }
  };
  if (type === STRING) return text(offset, sizeBytes);
  if (type !== ARRAY) return number(type, offset);
  if (itemType === ARRAY) return null; // no supported key has one
  if (itemType === STRING) return readTexts(header, offset, count);
  return Array.from({ length: count }, (_, i) => number(itemType, offset + i * SIZES[itemType]));
}
