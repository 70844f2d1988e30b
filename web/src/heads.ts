/** The heads of model files, by the core's parsers. */
import type { Core, CoreError } from "./core.js";
import type { WhetError } from "./errors.js";
import type { Reader } from "./sources.js";

export interface Tensor {
  name: string;
  type: string;
  shape: number[];
  /** In the file. */
  offset: number;
  sizeBytes: number;
}

/** A tensor as the core tells it. */
export type TensorRow = [name: string, type: string, shape: number[], offset: number, sizeBytes: number];

const SMALLEST_HEAD = 1 << 20;

/**
 * A file's head, of which more is read until it is whole, and what the core's parser says of it.
 *
 * @param parser the core's function.
 * @param refuse the error for a file that the parser refuses, from the parser's words.
 */
export async function readHead<T>(core: Core, parser: string, reader: Reader, refuse: (why: string) => WhetError): Promise<{ head: Uint8Array; found: T }> {
  for (let n = Math.min(SMALLEST_HEAD, reader.size); ; ) {
    const head = await reader.read(0, n);
    try {
      return { head, found: core.with([head], (at) => core.json<T>(parser, at, head.length, reader.size)) };
    } catch (error) {
      const { type, message } = error as Partial<CoreError>; // by its shape: the scripts of the package share no class
      if (type === undefined || message === undefined) throw error;
      if (!type.includes("MoreBytesNeeded")) throw refuse(message);
      n = Math.min(reader.size, Math.max(2 * n, Number(/\d+/.exec(message)?.[0])));
    }
  }
}

export function tensorsOf(rows: TensorRow[]): Map<string, Tensor> {
  return new Map(rows.map(([name, type, shape, offset, sizeBytes]) => [name, { name, type, shape, offset, sizeBytes }]));
}
