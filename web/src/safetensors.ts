/** Tensors of a safetensors file as float32. Source: https://github.com/huggingface/safetensors (the format). */
import { WhetError } from "./errors.js";
import { show } from "./sampling.js";
import type { Reader } from "./sources.js";

export interface Entry {
  dtype: string;
  shape: number[];
  /** In the file. */
  offset: number;
  sizeBytes: number;
}

const BYTES: Record<string, number> = { F64: 8, F32: 4, F16: 2, BF16: 2, I64: 8, I32: 4, I16: 2, I8: 1, U8: 1, BOOL: 1, F8_E4M3: 1, F8_E5M2: 1 };
const MOST_HEAD = 100_000_000; // bytes: the format's own limit

/** The tensors by name, each checked to lie in the file. */
export async function readSafetensors(reader: Reader, where: string): Promise<Map<string, Entry>> {
  const damaged = (why: string) => new WhetError(`${where}: ${reader.name} is no safetensors file, or damaged: ${why}. Download it again, or save it again.`);
  if (reader.size < 8) throw damaged(`it has ${reader.size} bytes`);
  const size = Number(new DataView((await reader.read(0, 8)).slice().buffer).getBigUint64(0, true));
  if (size < 2 || size > MOST_HEAD || 8 + size > reader.size) throw damaged(`its head has ${size} bytes and the file ${reader.size}`);
  let head: Record<string, any>;
  try {
    head = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode((await reader.read(8, size)).slice()));
  } catch (error) {
    throw damaged(`its head is no JSON (${(error as Error).message})`);
  }
  const found = new Map<string, Entry>();
  for (const [name, entry] of Object.entries(head ?? {})) {
    if (name === "__metadata__") continue;
    const { dtype, shape, data_offsets: offsets } = entry ?? {};
    const isWhole = (x: unknown) => Number.isSafeInteger(x) && (x as number) >= 0;
    if (!(dtype in BYTES) || !Array.isArray(shape) || !shape.every(isWhole) || !Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(isWhole)) {
      throw damaged(`${name} is ${show(entry)}`);
    }
    const [begin, end] = offsets as [number, number];
    const sizeBytes = (shape as number[]).reduce((a, b) => a * b, BYTES[dtype]);
    if (end - begin !== sizeBytes || 8 + size + end > reader.size) throw damaged(`${name} takes bytes ${begin} to ${end}, expected ${sizeBytes} inside the file`);
    found.set(name, { dtype, shape, offset: 8 + size + begin, sizeBytes });
  }
  return found;
}

/** A tensor's values. */
export async function readFloats(reader: Reader, name: string, entry: Entry, where: string): Promise<Float32Array> {
  const bytes = (await reader.read(entry.offset, entry.sizeBytes)).slice().buffer;
  switch (entry.dtype) {
    case "F32":
      return new Float32Array(bytes);
    case "F64":
      return Float32Array.from(new Float64Array(bytes));
    case "BF16":
      return new Float32Array(Uint32Array.from(new Uint16Array(bytes), (bits) => bits << 16).buffer);
    case "F16":
      return Float32Array.from(new Uint16Array(bytes), toFloat);
  }
  throw new WhetError(`${where}: ${name} is ${entry.dtype}, expected F32, F16 or BF16. Save it in floats.`);
}

function toFloat(half: number): number {
  const [sign, exponent, fraction] = [half >> 15 ? -1 : 1, (half >> 10) & 31, half & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent === 0 ? fraction * 2 ** -24 : (1024 + fraction) * 2 ** (exponent - 25));
}
