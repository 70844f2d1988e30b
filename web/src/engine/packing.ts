/** Packing of a model's tensors into the core's memory, or by way of it into a GPU's. */
import type { Core } from "../core/core.js";
import { WhetError } from "../core/errors.js";
import { engineCalls, lossFields } from "../facts.js";
import { type DownloadOptions, type Range, type Reader, readRanges } from "../files/reader.js";
import type { Uploads } from "../gpu/program.js";
import { TABLE } from "../models/architecture.js";
import { isFloat, type StoredType, weightFormats } from "../models/formats.js";
import { type PackingLoss, RangeCheck } from "../models/range.js";
import type { RowSlice } from "../models/slices.js";
import { loadHf } from "./chunks.js";
import type { Plan } from "./plan.js";

const BLOCK_BYTES = 1 << 20;

/** Split a matrix into blocks of rows, which are read and packed one at a time: the head is a third of some files. */
function splitRows(slice: RowSlice): RowSlice[] {
  const { tensor, row, count, firstRow } = slice;
  if (tensor.shape.length !== 2 || slice.isTransposed || slice.stride !== 1) return [slice];
  const storedBytes = tensor.sizeBytes / tensor.shape[0];
  const blockRows = Math.max(16, Math.floor(BLOCK_BYTES / storedBytes / 16) * 16);
  return Array.from({ length: Math.ceil(count / blockRows) }, (_, i) => {
    const n = Math.min(blockRows, count - i * blockRows);
    const rows = { ...tensor, shape: [n, tensor.shape[1]], offset: tensor.offset + (row + i * blockRows) * storedBytes, sizeBytes: n * storedBytes };
    return { ...slice, tensor: rows, row: 0, count: n, firstRow: firstRow + i * blockRows };
  });
}

interface Block extends Range {
  slices: RowSlice[];
}

/** Yield slices with the bytes of their tensors, in file order. */
async function* readSlices(slices: RowSlice[], reader: Reader): AsyncGenerator<[RowSlice, Uint8Array]> {
  const blocks: Block[] = [];
  for (const slice of slices.flatMap(splitRows).sort((a, b) => a.tensor.offset - b.tensor.offset)) {
    const begin = slice.tensor.offset;
    const end = begin + slice.tensor.sizeBytes;
    const last = blocks.at(-1);
    // Contiguous tensors only, so that a block is within one file: every file begins with a header.
    if (last !== undefined && begin <= last.end && (end <= last.end || end - last.begin <= BLOCK_BYTES)) {
      last.slices.push(slice);
      last.end = Math.max(last.end, end);
    } else {
      blocks.push({ begin, end, slices: [slice] });
    }
  }
  for await (const [{ begin, slices }, bytes] of readRanges(reader, blocks)) {
    for (const slice of slices) {
      const at = slice.tensor.offset - begin;
      yield [slice, bytes.subarray(at, at + slice.tensor.sizeBytes)];
    }
  }
}

/** Copy a slice's rows into the core's memory and pack them; return what packing loses. */
function pack(core: Core, slice: RowSlice, bytes: Uint8Array, types: Map<string, StoredType>, where: string): PackingLoss {
  const { tensor, row, count, stride, isTransposed } = slice;
  const type = types.get(slice.convert === undefined ? tensor.type : "F32")!;
  const isVector = tensor.shape.length === 1;
  if (isVector && !isFloat(type)) throw new WhetError(`Engine.load: ${where}: ${tensor.name} is ${tensor.type}, expected floats for a norm or bias.`);
  const k = tensor.shape[tensor.shape.length - 1];
  const storedBytes = isVector || isTransposed ? type.blockBytes : (k / type.block) * type.blockBytes;
  const width = isFloat(type) ? k : storedBytes;
  const [n, length, rowStride, columnStride] = isTransposed ? [count, tensor.shape[0], stride, k] : isVector ? [1, count, 0, stride] : [count, width, width * stride, 1];
  const rows = bytes.subarray(row * storedBytes, isTransposed ? undefined : (row + (count - 1) * stride + 1) * storedBytes);
  return core.withText(slice.slot, (slot, size) =>
    core.with([rows], (data) =>
      core.doubles(lossFields, engineCalls.pack(core, { slot, size, first: slice.firstRow, type: type.index, data, n, width: length, rowStride, columnStride })),
    ),
  );
}

/** Read a model's tensors, except the second embedding, and pack them; progress is reported per block. Without `uploads` they stay
 * in the core's memory. */
export async function packWeights(core: Core, { slices, types }: Pick<Plan, "slices" | "types">, reader: Reader & { name: string }, from: DownloadOptions, uploads?: Uploads): Promise<void> {
  if (uploads === undefined) core.call("allocate_weights");
  const range = new RangeCheck(weightFormats(core), reader.name);
  for await (const [slice, stored] of readSlices(slices.filter(({ slot }) => slot !== TABLE), reader)) {
    if (from.signal.aborted) throw from.signal.reason;
    const { convert, tensor } = slice;
    const bytes = convert === undefined ? stored : new Uint8Array((await loadHf()).toFloats(stored, tensor, reader.name).map(convert).buffer);
    uploads?.begin(slice.slot);
    range.add(slice, pack(core, slice, bytes, types, reader.name));
    await uploads?.end(slice.slot, slice.count);
    from.onProgress({ loadedBytes: tensor.offset + tensor.sizeBytes, totalBytes: reader.size, phase: "pack" });
  }
  range.finish();
  await uploads?.finish();
}
