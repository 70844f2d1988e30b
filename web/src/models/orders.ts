/** Orders of rows and columns in Hugging Face modules and their adapters, as in whet.models.slots. */
import { type OrderName, type RowCopy, type RowOrder, rowOrders } from "./slices.js";

export const hfOrders = {
  ...rowOrders,
  // gates and up projections of an expert, which alternate
  splitPairs: (_, rows) => [[0, 0, rows / 2, 2], [rows / 2, 1, rows / 2, 2]],
  // GPT-NeoX's query_key_value, [head][q, k, v], to [q, k, v][head]
  splitHeads: ({ headDim, nHeads }) =>
    Array.from({ length: 3 * nHeads }, (_, i) => [((i % 3) * nHeads + Math.floor(i / 3)) * headDim, i * headDim, headDim, 1]),
  // value heads of the delta rule, after queries and keys: by key head; GGUF has the first of each key head, then the second
  groupHeads: ({ nDeltaHeads: n, nDeltaKeyHeads: keys, deltaDim, deltaTiled }, rows) => {
    if (!deltaTiled) return [[0, 0, rows, 1]];
    const size = rows < n * deltaDim ? 1 : deltaDim;
    const begin = rows - n * size;
    const heads = Array.from({ length: n }, (_, i): RowCopy => [begin + (((i * keys) % n) + Math.floor((i * keys) / n)) * size, begin + i * size, size, 1]);
    return [[0, 0, begin, 1], ...heads];
  },
} as Record<OrderName, RowOrder>;

/** Copy columns of (..., k) from a module's order to the slot's, or back. */
export function moveColumns(values: Float32Array, k: number, copies: RowCopy[], isBack = false): Float32Array {
  const found = new Float32Array(values.length);
  for (let row = 0; row < values.length; row += k) {
    for (const [to, from, count] of copies) {
      const [into, at] = isBack ? [from, to] : [to, from];
      found.set(values.subarray(row + at, row + at + count), row + into);
    }
  }
  return found;
}
