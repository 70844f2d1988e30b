/** Mapping of the tensors in a model's files to rows of the engine's slots, as in whet.models.slots. */
import { WhetError } from "../core/errors.js";
import type { Tensor } from "../files/headers.js";
import { hasOwnKv, isMixture, type ModelConfig, moduleRows, slots } from "./architecture.js";

/** Rows of a tensor and their destination in a slot. */
export interface RowSlice {
  slot: string;
  firstRow: number;
  tensor: Tensor;
  /** First row in the tensor, number of rows, and stride in rows. */
  row: number;
  count: number;
  stride: number;
  /** Whether the tensor is (inputs, outputs): its columns are the rows. */
  isTransposed: boolean;
  /** The slot's number for one of the tensor. Default: the same. */
  convert?: (weight: number) => number;
}

export type OrderName = "keepOrder" | "deinterleave" | "splitHeads" | "groupHeads" | "splitPairs";

/** Module of a file: its possible names ("{i}": the layer, "{e}": the expert) and its layout, if it differs from the slot's. */
export interface ModuleSpec {
  names: readonly string[];
  /** Name of the module that folders may have instead. */
  file?: string;
  order?: OrderName;
  columnOrder?: OrderName;
  isTransposed?: boolean;
  /** Constant that the model adds to a norm's weights. */
  offset?: number;
  /** Whether the model uses -exp of the weight. */
  isNegativeExp?: boolean;
  /** Name of the weight in the module. Default: "weight". */
  parameter?: string;
  /** Whether a learner has adapters of it by default. Default: true. */
  isAdapted?: boolean;
}

/** A tensor, or the rows of one module in a fused tensor. */
export interface StoredTensor {
  tensor: Tensor;
  row: number;
  shape: number[];
}

/** Location of a module in its slot: rows [firstRow, firstRow + count) of `rows`, in a layer. */
export interface WeightLocation {
  layer: number;
  part: string;
  firstRow: number;
  count: number;
  rows: number;
}

export type RowCopy = [to: number, from: number, count: number, stride: number];

/** Return the row copies from a module's stored order to the slot's order. */
export type RowOrder = (config: ModelConfig, rows: number) => RowCopy[];

/** Orders of rows in GGUF files. */
export const rowOrders: Partial<Record<OrderName, RowOrder>> = {
  keepOrder: (_, rows) => [[0, 0, rows, 1]],
  // llama.cpp interleaves Llama's q and k: its row 2i + p of a head is row i + p headDim / 2
  deinterleave: ({ headDim }, rows) =>
    Array.from({ length: (2 * rows) / headDim }, (_, i) => {
      const [head, parity] = [Math.floor(i / 2) * headDim, i % 2];
      return [head + (parity * headDim) / 2, head + parity, headDim / 2, 2];
    }),
};

/** Return the modules; of slots that a folder stores in `file`, these. */
export function storedModules(modules: Readonly<Record<string, ModuleSpec>>, names: Iterable<string>): Record<string, ModuleSpec> {
  const all = [...names];
  const isStored = (file: string) => {
    const pattern = new RegExp(`(^|\\.)${file.slice(file.indexOf(".") + 1).replaceAll(".", "\\.").replace(/\{[ie]\}/g, "\\d+")}\\.weight$`);
    return all.some((name) => pattern.test(name));
  };
  const slotOf = (target: string) => target.split(":")[0];
  const inFiles = new Set(Object.keys(modules).filter((target) => modules[target].file !== undefined && isStored(modules[target].file)).map(slotOf));
  const found = Object.entries(modules).map(([target, module]): [string, ModuleSpec] => [target, inFiles.has(slotOf(target)) ? { names: module.file === undefined ? [] : [module.file] } : module]);
  return Object.fromEntries(found.filter(([, { names }]) => names.length > 0));
}

/** Yield each module of each layer, of each expert if its names have one, with its slot and the names that it has there. */
export function* eachModule(config: ModelConfig, modules: Readonly<Record<string, ModuleSpec>>): Generator<{ module: ModuleSpec; slot: string; part: string; layer: number; names: string[]; expert?: number }> {
  for (const [target, module] of Object.entries(modules)) {
    const [whole, ofMixtures] = target.split("|");
    const [pattern, part = ""] = whole.split(":");
    const isSome = ofMixtures !== undefined || `${whole}|moe` in modules; // of layers with a mixture, or of the others
    for (let layer = 0; layer < (pattern.includes("{i}") ? config.nLayers : 1); ++layer) {
      if (isSome && isMixture(config, layer) !== (ofMixtures !== undefined)) continue;
      const [slot, ...names] = [pattern, ...module.names].map((text) => text.replace("{i}", String(layer)));
      if (!names[0]?.includes("{e}")) yield { module, slot, part, layer, names };
      else for (let expert = 0; expert < config.nExperts; ++expert) yield { module, slot, part, layer, names: names.map((name) => name.replace("{e}", String(expert))), expert };
    }
  }
}

/** Return the module of a tensor: its name without the last part. */
export const moduleOf = (tensor: string) => tensor.slice(0, tensor.lastIndexOf("."));

/** Return the modules of keys and values in layers that read another's: files may have them. */
export function unreadModules(config: ModelConfig, modules: Readonly<Record<string, ModuleSpec>>): Set<string> {
  const all = [...eachModule(config, modules)];
  return new Set(all.flatMap(({ slot, part, layer, names }) => (hasOwnKv(config, layer) || !/^[kv]$/.test(part || slot.replace(/^.*\.(.)_norm$/, "$1")) ? [] : names)));
}

/**
 * Return the slices that fill every slot exactly once.
 *
 * @param modules the files' modules by slot.
 * @param find returns the tensor of the first of these modules that exists; throws if none does.
 * @param orders orders of rows by name.
 */
export function listSlices(config: ModelConfig, modules: Readonly<Record<string, ModuleSpec>>, find: (names: string[], suffix: string, location: WeightLocation) => StoredTensor, where: string, orders = rowOrders): RowSlice[] {
  const shapes = slots(config);
  const slices: RowSlice[] = [];
  for (const { module, slot: own, part, layer, names, expert } of eachModule(config, modules)) {
    const weight = shapes.has(own) ? own : `${own}.weight`;
    const { parameter } = module;
    for (const [suffix, slot] of [[parameter ?? "weight", weight], [parameter === undefined ? "bias" : `${parameter}_bias`, `${own}.bias`]]) {
      const shape = shapes.get(slot);
      if (shape === undefined) continue;
      const isOfExperts = slot.includes(".experts_");
      const [first, whole] = moduleRows(config, layer, part, shape[0], isOfExperts);
      if (whole === 0) continue; // the layer reads another's keys and values
      const [firstRow, count] = expert === undefined ? [first, whole] : [first + (expert * shape[0]) / config.nExperts, whole / config.nExperts];
      const { tensor: found, row, shape: axes } = find(names, suffix, { layer, part, firstRow, count, rows: shape[0] });
      const isTransposed = module.isTransposed === true && shape.length === 2;
      const nParts = isOfExperts && module.isTransposed ? config.nExperts : 1; // of experts that are read one by one
      const stored = nParts > 1 ? axes : asMatrix(axes, count, isOfExperts || slot.endsWith("router"), shape.length);
      const tensor = isOfExperts || shape.length === 1 ? { ...found, shape: nParts > 1 ? stored.slice(1) : stored, sizeBytes: found.sizeBytes / nParts } : found;
      const ofOne = isTransposed ? [shape[1], count / nParts] : [count / nParts, ...shape.slice(1)];
      const expected = nParts > 1 ? [nParts, ...ofOne] : ofOne;
      if (stored.join() !== expected.join()) {
        throw new WhetError(`${where}: ${tensor.name} has shape (${stored.join(", ")}), expected (${expected.join(", ")}). The config belongs to another model, or the file is damaged.`);
      }
      const { offset, isNegativeExp } = slot === weight ? module : ({} as ModuleSpec);
      const convert = isNegativeExp ? (x: number) => -Math.exp(x) : offset ? (x: number) => x + offset : undefined;
      const isSpread = isOfExperts && part !== "" && expert === undefined; // gate and up of each expert are in turn in the slot
      const copies = isSpread ? spread(config.nExperts, count / config.nExperts) : orders[module.order ?? "keepOrder"]!(config, count / nParts);
      for (let i = 0; i < nParts; ++i) {
        const of = nParts > 1 ? { ...tensor, offset: tensor.offset + i * tensor.sizeBytes } : tensor;
        for (const [to, from, n, stride] of copies) {
          slices.push({ slot, firstRow: firstRow + (i * count) / nParts + to, tensor: of, row: row + from, count: n, stride, isTransposed, convert });
        }
      }
    }
  }
  return slices;
}

const spread = (n: number, rows: number): RowCopy[] => Array.from({ length: n }, (_, i) => [2 * i * rows, i * rows, rows, 1]);

/** Return the axes of a matrix of n rows: of experts one after another, one row, or the taps of a depthwise convolution. */
function asMatrix(axes: number[], n: number, isFlat: boolean, nAxes: number): number[] {
  const k = axes[axes.length - 1];
  if (nAxes === 1 && axes.reduce((a, b) => a * b, 1) === n) return [n]; // biases of experts, vectors of more axes
  if (isFlat && axes.reduce((a, b) => a * b, 1) === n * k) return [n, k];
  return axes.length === 3 && axes[1] === 1 ? [axes[0], k] : axes;
}
