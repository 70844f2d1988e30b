/** Tensors of safetensors files as float32. */
import type { Core } from "../core/core.js";
import { WhetError } from "../core/errors.js";
import { byName, readHeader, type Tensor } from "./headers.js";
import type { Reader } from "./reader.js";

export async function readSafetensors(core: Core, reader: Reader, where: string): Promise<Map<string, Tensor>> {
  const toError = (why: string) => new WhetError(`${where}: ${reader.name} is not a safetensors file, or it is damaged: ${why}`);
  return byName((await readHeader<Tensor[]>(core, "parse_safetensors", reader, toError)).found);
}

/** Read a tensor's values. */
export async function readFloats(reader: Reader, entry: Tensor, where: string): Promise<Float32Array> {
  return toFloats(await reader.read(entry.offset, entry.sizeBytes), entry, where);
}

/** Convert a tensor's bytes to float32. */
export function toFloats(data: Uint8Array, entry: Tensor, where: string): Float32Array {
  const bytes = data.slice().buffer;
  switch (entry.type) {
    case "F32": return new Float32Array(bytes);
    case "F64": return Float32Array.from(new Float64Array(bytes));
    case "BF16": return new Float32Array(Uint32Array.from(new Uint16Array(bytes), (bits) => bits << 16).buffer);
    case "F16": return Float32Array.from(new Uint16Array(bytes), toFloat);
  }
  throw new WhetError(`${where}: ${entry.name} is ${entry.type}, expected F32, F16 or BF16. Save it as floats.`);
}

function toFloat(half: number): number {
  const [sign, exponent, fraction] = [half >> 15 ? -1 : 1, (half >> 10) & 31, half & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent === 0 ? fraction * 2 ** -24 : (1024 + fraction) * 2 ** (exponent - 25));
}
