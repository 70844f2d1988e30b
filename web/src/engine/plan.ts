/** Plans of models: configs, weight formats and sizes, from the headers of their files. */
import type { Core } from "../core/core.js";
import { MissingFileError, OutOfMemoryError, WhetError } from "../core/errors.js";
import { startCore } from "../core/start.js";
import { engineCalls } from "../facts.js";
import { join, type ModelReader, openModel, readHeaders } from "../files/parts.js";
import type { DownloadOptions } from "../files/reader.js";
import { type Files, isFolder, openRanges, openReader } from "../files/sources.js";
import { encodeConfig, type Family, type ModelConfig, slots, TABLE } from "../models/architecture.js";
import type { FolderReader } from "../models/folder.js";
import { chooseFormats, type FormatSpan, rowBytes, type StoredType, storedTypes, weightFormats } from "../models/formats.js";
import { describeGguf, hasTable } from "../models/gguf.js";
import type { RowSlice } from "../models/slices.js";
import { TextTokenizer } from "../text/tokenizer.js";
import { loadHf } from "./chunks.js";
import type { Estimate, LoadOptions } from "./protocol.js";
import { planTable, type Table } from "./token_rows.js";

const DEFAULT_MAX_CONTEXT = 4096; // tokens
const DEFAULT_BATCH = 4; // samples
export const PREFILL_CHUNK = 64; // prompt tokens per step
export const PAGE_TOKENS = 64;

/** Description of a model, read from its files. */
interface Model {
  architecture: string;
  config: ModelConfig;
  family: Family;
  slices: RowSlice[];
  hasChatTemplate: boolean;
  tokenizer(where: string): TextTokenizer;
}

/** A model with its weight formats. */
export interface Plan extends Model {
  formats: Map<string, FormatSpan[]>;
  types: Map<string, StoredType>;
  /** Size of a page of the KV cache: PAGE_TOKENS tokens. */
  pageBytes: number;
  /** Size of the KV cache. */
  kvBytes: number;
  /** 1 if the cache is in bfloat16, else 0. */
  bf16Cache: number;
  /** Tokens of a step: of the samples, and of prompts. */
  maxRows: number;
  /** The second embedding, if the model has one. */
  table: Table | undefined;
}

type Sized = Pick<Plan, "config" | "formats" | "table">;

/** Return a model's size and memory from the headers of its files. */
export async function estimate(files: Files, options: LoadOptions, from: DownloadOptions): Promise<Estimate> {
  const { core } = await startCore(false, "Engine.estimate");
  const reader = await open(files, from, true);
  try {
    const { slices, ...plan } = await makePlan(core, reader, options, true, from.where);
    return { ...describePlan(plan), fileBytes: reader.size, weightsBytes: weightsBytesOf(core, plan), kvBytes: (plan.pageBytes / PAGE_TOKENS) * plan.config.maxPosition };
  } finally {
    await reader.close?.();
  }
}

function weightsBytesOf(core: Core, { config, formats, table }: Sized): number {
  const known = weightFormats(core);
  let bytes = table?.bytes ?? 0;
  for (const [slot, shape] of slots(config)) {
    if (slot === TABLE) continue;
    const spans = formats.get(slot);
    if (spans === undefined) bytes += 4 * shape[0];
    for (const { rows, format } of spans ?? []) bytes += rows * rowBytes(known.get(format)!, shape[1]);
  }
  return Math.round(bytes);
}

/** Check that the KV cache has pages for a prompt and its sample, and fits with the weights in the core's 32-bit memory. */
export function checkMemory(core: Core, plan: Sized & Pick<Plan, "pageBytes" | "kvBytes">, isInCore: boolean): void {
  const { kvBytes } = plan;
  const minBytes = 2 * plan.pageBytes;
  if (kvBytes < minBytes) throw new WhetError(`Engine.load: kvBytes is ${kvBytes}, expected at least ${minBytes}: a page for the prompt and one for its sample.`);
  if (!isInCore) return;
  const weightsBytes = weightsBytesOf(core, plan);
  if (weightsBytes + kvBytes < core.maxBytes) return;
  const mb = (bytes: number) => `${Math.ceil(bytes / 1e6)} MB`;
  throw new OutOfMemoryError(
    `Engine.load: weights take ${mb(weightsBytes)} and the KV cache ${mb(kvBytes)} with contextLength=${plan.config.maxPosition}, expected at most ${mb(core.maxBytes)} in total. Load a smaller model, or pass a smaller contextLength or kvBytes.`,
  );
}

export type ModelFiles = ModelReader | FolderReader;

/** Open a model's files. `headersOnly`: download only the ranges that are read. */
export async function open(files: Files, from: DownloadOptions, headersOnly: boolean): Promise<ModelFiles> {
  const hasFolder = files.length === 1 ? await isFolder(files[0][1]) : files.some(([name]) => /(^|\/)config\.json$/.test(name));
  if (!hasFolder) return openModel(files, { ...from, isReadInPlace: hasTable }, { headersOnly });
  const openOne = headersOnly ? openRanges : openReader;
  const unlessMissing = (error: unknown) => {
    if (!(error instanceof MissingFileError)) throw error;
    return undefined;
  };
  const openers = { join, open: (name: string, file: Files[number][1], isReadInPlace: () => boolean) => openOne(name, file, { ...from, isReadInPlace }).catch(unlessMissing) };
  return (await loadHf()).openFolder(files, from, headersOnly, openers);
}

export async function makePlan(core: Core, reader: ModelFiles, { contextLength, weights, kvBytes, maxBatch = DEFAULT_BATCH }: LoadOptions, headersOnly: boolean, where: string, tableBytes?: number): Promise<Plan> {
  const lengthOf = (trained: number) => contextLength ?? Math.min(trained, DEFAULT_MAX_CONTEXT);
  const model = "folder" in reader ? await readFolderModel(core, reader, lengthOf, headersOnly, where) : await readGgufModel(core, reader, lengthOf, where);
  const types = storedTypes(core);
  const formats = chooseFormats(core, model.config, model.slices, types, weights, where);
  const numbers = encodeConfig(model.config);
  core.with([numbers], (at) => core.call("begin_model", at, numbers.length));
  addSlots(core, model.config, formats);
  const maxRows = maxBatch + PREFILL_CHUNK;
  const table = planTable(model.config, model.slices, types, maxRows, tableBytes);
  const bf16Cache = Number(hasBf16Cache(formats));
  const pageBytes = core.call("kv_page_bytes", bf16Cache);
  // One sequence of maxPosition tokens, and for every further sample its last prompt page and a new page.
  const cacheBytes = kvBytes ?? pageBytes * (Math.ceil(model.config.maxPosition / PAGE_TOKENS) + 2 * maxBatch);
  return { ...model, types, formats, table, maxRows, bf16Cache, pageBytes, kvBytes: cacheBytes };
}

/** Name a model's weights and their formats to the core. */
function addSlots(core: Core, config: ModelConfig, formats: Map<string, FormatSpan[]>): void {
  const known = weightFormats(core);
  for (const [slot, shape] of slots(config)) {
    core.withText(slot, (at, n) => {
      const spans = formats.get(slot);
      if (spans === undefined) return core.call("add_vector", at, n, shape[0]);
      for (const span of spans) engineCalls.add_matrix(core, { slot: at, size: n, format: known.get(span.format)!.index, n: span.rows, k: shape[1] });
      return 0;
    });
  }
}

async function readFolderModel(core: Core, reader: FolderReader, lengthOf: (trained: number) => number, headersOnly: boolean, caller: string): Promise<Model> {
  const { describeFolder, hasTemplate, readTokenizerFiles } = await loadHf();
  return {
    ...(await describeFolder(core, reader, lengthOf, headersOnly, caller)),
    architecture: String(reader.folder.config.model_type),
    hasChatTemplate: hasTemplate(reader.folder, caller),
    tokenizer: (where) => TextTokenizer.fromFolder(readTokenizerFiles(reader.folder, where), where),
  };
}

async function readGgufModel(core: Core, reader: ModelReader, lengthOf: (trained: number) => number, caller: string): Promise<Model> {
  const file = await readHeaders(core, reader, caller);
  const { metadata } = file;
  const architecture = String(metadata.get("general.architecture"));
  return {
    ...(await describeGguf(core, file, reader, lengthOf, caller)),
    architecture,
    hasChatTemplate: metadata.has("tokenizer.chat_template"),
    tokenizer: (where) => TextTokenizer.fromGguf(metadata, where),
  };
}

export function describePlan({ architecture, config, formats }: Pick<Plan, "architecture" | "config" | "formats">) {
  return {
    architecture,
    parameters: [...slots(config).values()].reduce((sum, shape) => sum + shape.reduce((a, b) => a * b), 0),
    contextLength: config.maxPosition,
    formats: [...new Set([...formats.values()].flatMap((spans) => spans.map((span) => span.format)))],
  };
}

const hasBf16Cache = (formats: Map<string, FormatSpan[]>) => [...formats].find(([slot]) => /\.(o|(conv|delta)_out)$/.test(slot))![1].some((span) => span.format !== "float32");
