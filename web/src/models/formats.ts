/** Weight formats of the engine and tensor types of files, by the rules of whet.models.formats. */
import type { Core } from "../core/core.js";
import { show, WhetError } from "../core/errors.js";
import { formats as SETTINGS } from "../facts.js";
import { type ModelConfig, slots, TABLE } from "./architecture.js";
import type { RowSlice } from "./slices.js";

interface BlockType {
  index: number;
  block: number;
  blockBytes: number;
}

/** Type of tensors in files. */
export interface StoredType extends BlockType {
  gguf: string;
  packedAs: string;
}

export const isFloat = (type: StoredType) => type.block === 1;

/** Return the tensor types by GGUF name; safetensors uses the same names for floats. */
export function storedTypes(core: Core): Map<string, StoredType> {
  return new Map(core.json<StoredType[]>("stored_types").map((type) => [type.gguf, type]));
}

/** Format of packed weights. */
export interface WeightFormat extends BlockType {
  name: string;
  rowScaleBytes: number;
  /** Whether this build can quantise to it. */
  canPack: boolean;
}

/** Return the size of a packed row of k weights. */
export const rowBytes = ({ block, blockBytes, rowScaleBytes }: WeightFormat, k: number) => (k / block) * blockBytes + rowScaleBytes;

export function weightFormats(core: Core): Map<string, WeightFormat> {
  return new Map(core.json<WeightFormat[]>("weight_formats").map((format) => [format.name, format]));
}

/** Consecutive rows of a matrix in one format. */
export interface FormatSpan {
  rows: number;
  format: string;
}

interface Setting {
  alias?: string;
  /** Format of the embedding and the head. */
  embeddingFormat?: string;
  /** Fallback for row lengths that are not a multiple of the block. Default: int8. */
  next?: string;
}

const settings: Record<string, Setting> = SETTINGS;

/** Return the name of a format in settings. */
export const nameInSettings = (format: string) => settings[format]?.alias ?? format;
/** Whether weights are stored as floats. */
export const isFloatFormat = (format: string) => format === "float32" || format === "bfloat16";

/**
 * Choose the format of every matrix.
 *
 * @param weights format of all matrices. Default: quantised rows keep their format, floats become bfloat16.
 */
export function chooseFormats(core: Core, config: ModelConfig, slices: RowSlice[], types: Map<string, StoredType>, weights: string | undefined, where: string): Map<string, FormatSpan[]> {
  const known = weightFormats(core);
  const base = weights === undefined ? "bfloat16" : (Object.keys(settings).find((name) => settings[name].alias === weights) ?? weights);
  if (!known.get(base)?.canPack) {
    const names = [...known].flatMap(([name, { canPack }]) => (canPack ? [nameInSettings(name)] : []));
    throw new WhetError(`${where}: weights is ${show(weights)}, expected one of ${names.join(", ")}, or none for the file's formats.`);
  }
  const stored = new Map<string, FormatSpan[]>();
  for (const { slot, tensor, count } of weights === undefined ? [...slices].sort((a, b) => a.firstRow - b.firstRow) : []) {
    const type = types.get(tensor.type)!;
    const span = { rows: count, format: isFloat(type) ? base : type.packedAs };
    stored.set(slot, [...(stored.get(slot) ?? []), span]);
  }
  const found = new Map<string, FormatSpan[]>();
  for (const [slot, shape] of slots(config)) {
    if (shape.length !== 2 || slot === TABLE) continue;
    const embeddingFormat = slot === "embedding" || slot === "head" ? settings[base]?.embeddingFormat : undefined;
    const spans = /^positions$|\.conv$|router$/.test(slot) ? [{ rows: shape[0], format: "float32" }] : (stored.get(slot) ?? [{ rows: shape[0], format: embeddingFormat ?? base }]);
    const merged: FormatSpan[] = [];
    for (let { rows, format } of spans) {
      while (shape[1] % known.get(format)!.block !== 0) format = settings[format]?.next ?? "int8";
      const last = merged.at(-1);
      if (last?.format === format) last.rows += rows;
      else merged.push({ rows, format });
    }
    found.set(slot, merged);
  }
  return found;
}
