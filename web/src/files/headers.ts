/** Headers of model files, parsed by the core. */
import type { Core, CoreError } from "../core/core.js";
import type { WhetError } from "../core/errors.js";
import type { Reader } from "./reader.js";

/** Tensor of a file, as in the core's JSON. */
export interface Tensor {
  name: string;
  type: string;
  shape: number[];
  /** Position in the file, in bytes. */
  offset: number;
  sizeBytes: number;
}

const MIN_HEADER_BYTES = 1 << 20;

/**
 * Read and parse a file's header, with growing reads until it is complete.
 *
 * @param parser name of the core's function.
 * @param toError makes the error of an invalid file from the parser's message.
 */
export async function readHeader<T>(core: Core, parser: string, reader: Reader, toError: (why: string) => WhetError): Promise<{ header: Uint8Array; found: T }> {
  for (let n = Math.min(MIN_HEADER_BYTES, reader.size); ; ) {
    const header = await reader.read(0, n);
    try {
      return { header, found: core.with([header], (at) => core.json<T>(parser, at, header.length, reader.size)) };
    } catch (error) {
      const { type, message } = error as Partial<CoreError>; // duck-typed: each script of the package has its own class
      if (type === undefined || message === undefined) throw error;
      if (!type.includes("MoreBytesNeeded")) throw toError(message);
      n = Math.min(reader.size, Math.max(2 * n, Number(/\d+/.exec(message)?.[0])));
    }
  }
}

export const byName = (tensors: Tensor[]) => new Map(tensors.map((tensor) => [tensor.name, tensor]));
