/** Rows of a second embedding (Gemma 4), which is about as large as the rest of the model: it stays in its file, and a step reads
 * the rows of its tokens into the core's memory, in place of the least recently used. */
import type { Core } from "../core/core.js";
import { WhetError } from "../core/errors.js";
import type { Tensor } from "../files/headers.js";
import type { Caller, Reader } from "../files/reader.js";
import { type ModelConfig, TABLE } from "../models/architecture.js";
import type { StoredType } from "../models/formats.js";
import type { RowSlice } from "../models/slices.js";

const MEMORY_BYTES = 2 ** 26; // 7,000 rows of Gemma 4 E2B in Q8_0
const INDEX_BYTES = 4; // of each row and each place
const READS = 8; // at once

/** The second embedding in its file, and the number of its rows that are kept in memory. */
export interface Table {
  tensor: Tensor;
  type: number;
  rowBytes: number;
  places: number;
  /** Memory that it takes in the core. */
  bytes: number;
}

/** Return a model's second embedding, if it has one. `maxTokens`: of a step, whose rows are kept together. */
export function planTable(config: ModelConfig, slices: readonly RowSlice[], types: ReadonlyMap<string, StoredType>, maxTokens: number, memoryBytes = MEMORY_BYTES): Table | undefined {
  const tensor = slices.find(({ slot }) => slot === TABLE)?.tensor;
  if (tensor === undefined) return undefined;
  const { vocabSize } = config;
  const rowBytes = tensor.sizeBytes / vocabSize;
  const places = Math.min(vocabSize, Math.max(maxTokens, Math.floor(memoryBytes / rowBytes)));
  return { tensor, type: types.get(tensor.type)!.index, rowBytes, places, bytes: places * rowBytes + INDEX_BYTES * (places + vocabSize) };
}

export class TokenRows {
  private readonly placeOf = new Map<number, number>(); // by token, the least recently used first
  private readonly free: number[];
  private readonly memory: number; // address

  constructor(
    private readonly core: Core,
    private readonly table: Table,
    private readonly reader: Reader,
  ) {
    this.free = Array.from({ length: table.places }, (_, i) => i);
    this.memory = core.call("hold_rows", table.type, table.places) >>> 0;
  }

  /** Read the rows of these tokens that are not in memory. Return whether there were any: the next step may have changed since. */
  async read(tokens: Iterable<number>, by: Caller): Promise<boolean> {
    const missing: number[] = [];
    const different = new Set(tokens);
    if (different.size > this.table.places) {
      throw new WhetError(`${by.where}: the batch has ${different.size} tokens, with memory for ${this.table.places} rows of ${this.table.tensor.name}. Pass a smaller maxTokensPerStep, or fewer rows.`);
    }
    for (const token of different) {
      const place = this.placeOf.get(token);
      if (place === undefined) missing.push(token);
      else {
        this.placeOf.delete(token); // to the end
        this.placeOf.set(token, place);
      }
    }
    if (missing.length === 0) return false;
    for (const [token, bytes] of await this.readRows(missing, by)) this.place(token, bytes, by.where);
    return true;
  }

  /** Read rows, several at once. The first error ends all. */
  private async readRows(tokens: readonly number[], by: Caller): Promise<[token: number, bytes: Uint8Array][]> {
    const { tensor, rowBytes } = this.table;
    const end = new AbortController();
    const signal = AbortSignal.any([by.signal, end.signal]);
    const rows: [token: number, bytes: Uint8Array][] = [];
    const queue = tokens.values();
    const readSome = async () => {
      for (const token of queue) {
        if (signal.aborted) throw signal.reason;
        rows.push([token, await this.reader.read(tensor.offset + token * rowBytes, rowBytes, { where: this.label(token, by.where), signal })]);
      }
    };
    try {
      await Promise.all(Array.from({ length: READS }, readSome));
    } finally {
      end.abort();
    }
    return rows;
  }

  private label(token: number, where: string): string {
    return `${where}: ${this.table.tensor.name}, the row of token ${token}`;
  }

  private place(token: number, bytes: Uint8Array, where: string): void {
    const place = this.free.pop() ?? this.dropOldest();
    this.core.bytes(this.memory + place * this.table.rowBytes, bytes.length).set(bytes);
    if (this.core.call("place_row", token, place) === 1) {
      this.placeOf.set(token, place);
      return;
    }
    this.free.push(place);
    throw new WhetError(`${this.label(token, where)}, contains NaN or infinity in ${this.reader.name}. Save the model again.`);
  }

  private dropOldest(): number {
    const [[token, place]] = this.placeOf;
    this.placeOf.delete(token);
    return place;
  }
}
