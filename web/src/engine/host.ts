/** Host of the core in the engine's worker: loads a model into its memory and runs requests. */
import { type Core, CoreError } from "../core/core.js";
import { MissingFileError, OutOfMemoryError, WhetError } from "../core/errors.js";
import { encode } from "../core/fields.js";
import { nProcessors, yieldToEventLoop } from "../core/port.js";
import { startCore } from "../core/start.js";
import { engineCalls, enums, promptFields, sampleFields } from "../facts.js";
import { join, type ModelReader, openModel, readHeaders } from "../files/parts.js";
import { closeAll, type DownloadOptions, type Range, type Reader, readRanges } from "../files/reader.js";
import { type Files, isFolder, openRanges, openReader } from "../files/sources.js";
import { encodeConfig, type Family, type ModelConfig, slots } from "../models/architecture.js";
import type { Row } from "../learner/batch.js";
import type { LearnerHost } from "../learner/host.js";
import type { AdapterSettings, Example, LearnerInfo, LearnRequest } from "../learner/protocol.js";
import type { LoraFactors } from "../models/adapters.js";
import type { FolderReader } from "../models/folder.js";
import { chooseFormats, type FormatSpan, isFloat, rowBytes, type StoredType, storedTypes, weightFormats } from "../models/formats.js";
import { describeGguf } from "../models/gguf.js";
import type { RowSlice } from "../models/slices.js";
import type { TextStream, TokenTexts } from "../text/token_texts.js";
import { type Message, type PromptOptions, TextTokenizer } from "../text/tokenizer.js";
import { loadHf, loadLearner } from "./chunks.js";
import type { Call, Estimate, Info, LoadOptions, Measure, Request, Token } from "./protocol.js";

const PREFILL_CHUNK = 64; // prompt tokens per step
const DEFAULT_MAX_CONTEXT = 4096; // tokens
const PAGE_TOKENS = 64;

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
interface Plan extends Model {
  formats: Map<string, FormatSpan[]>;
  types: Map<string, StoredType>;
  /** Size of a page of the KV cache: PAGE_TOKENS tokens. */
  pageBytes: number;
}

type Sized = Pick<Plan, "config" | "formats">;

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

export class Host {
  private readonly adapters = new Set<number>();
  private nextAdapter = 1;
  private tokenizer: TextTokenizer | undefined;
  private hasTokenTexts = false; // whether the core has the token texts
  private learner: LearnerHost | undefined;

  private constructor(
    private readonly core: Core,
    private readonly plan: Omit<Plan, "slices">,
    private readonly staticInfo: Omit<Info, "memoryBytes">,
    /** Name or URL of the model. */
    private readonly name: string,
    private readonly weights: string | undefined,
  ) {}

  /** `startWorker`: starts a worker for a thread, which receives its Thread on the port. */
  static async load(files: Files, options: LoadOptions, isolated: boolean, from: DownloadOptions, startWorker: (port: MessagePort) => void): Promise<Host> {
    const { core, build } = await startCore(isolated, "Engine.load", { learning: options.learning });
    const reader = await open(files, from, false);
    try {
      const { slices, ...plan } = await makePlan(core, reader, options, false, from.where);
      const { config, formats, types } = plan;
      const maxBatch = options.maxBatch ?? 4;
      // One sequence of maxPosition tokens, and for every further sample its last prompt page and a new page.
      const kvBytes = options.kvBytes ?? plan.pageBytes * (Math.ceil(config.maxPosition / PAGE_TOKENS) + 2 * maxBatch);
      checkMemory(core, plan, kvBytes);
      const n = build !== "plain" ? (options.threads ?? Math.max(1, Math.floor(nProcessors() / 2))) : 1;
      await Promise.all(Array.from({ length: n - 1 }, () => startThread(core, startWorker)));
      core.call("set_threads", n);
      allocateWeights(core, config, formats);
      for await (const [slice, stored] of readSlices(slices, reader)) {
        if (from.signal.aborted) throw from.signal.reason;
        const { offset, tensor } = slice;
        const bytes = offset === 0 ? stored : new Uint8Array((await loadHf()).toFloats(stored, tensor, reader.name).map((x) => x + offset).buffer);
        pack(core, slice, bytes, types, reader.name);
        from.onProgress({ loadedBytes: tensor.offset + tensor.sizeBytes, totalBytes: reader.size, phase: "pack" });
      }
      engineCalls.begin_engine(core, { kvBytes, maxBatch, chunk: PREFILL_CHUNK, bf16Cache: +hasBf16Cache(formats) });
      const info = {
        ...describePlan(plan),
        vocabSize: config.vocabSize,
        threads: n,
        build,
        exact: core.call("is_fused") === 1,
        hasChatTemplate: plan.hasChatTemplate,
        weightsBytes: core.call("weights_bytes") >>> 0,
        kvBytes: core.call("kv_bytes") >>> 0,
      };
      return new Host(core, plan, info, reader.name, options.weights);
    } finally {
      await reader.close?.();
    }
  }

  info(): Info {
    return { ...this.staticInfo, memoryBytes: this.core.memoryBytes };
  }

  /** Return the tokenizer, built on first use: token ids do not need it. */
  getTokenizer(where: string): TextTokenizer {
    return (this.tokenizer ??= this.plan.tokenizer(where));
  }

  /** Tokens of the longest sequence in the KV cache, next to the sample's copy of the prompt's last page. */
  private get kvTokens(): number {
    return (this.staticInfo.kvBytes / this.plan.pageBytes - 1) * PAGE_TOKENS;
  }

  measure(messages: Message[], options: PromptOptions): Measure {
    const { maxPosition } = this.plan.config;
    return { tokens: this.encodePrompt(messages, options, "Chat.send").length, context: Math.min(maxPosition, this.kvTokens) };
  }

  private encodePrompt(prompt: string | Message[] | Int32Array, options: PromptOptions, where: string): Int32Array {
    if (prompt instanceof Int32Array) return prompt;
    const tokenizer = this.getTokenizer(where);
    const text = typeof prompt === "string" ? prompt : tokenizer.render(prompt, options, where);
    const ids = tokenizer.encode(text, typeof prompt === "string"); // a template contains its own special tokens
    if (ids.length === 0) throw new WhetError(`${where}: prompt has no tokens, expected at least one. Pass a non-empty text.`);
    return Int32Array.from(ids);
  }

  private checkIds(ids: Iterable<number>, name: string, where: string): void {
    const { vocabSize } = this.plan.config;
    for (const id of ids) {
      if (id < 0 || id >= vocabSize) throw new WhetError(`${where}: ${name} has the token ${id}, expected ids from 0 to ${vocabSize - 1}. Use the model's own tokenizer.`);
    }
  }

  private checkLength(ids: Int32Array, name: string, room: number, where: string): void {
    this.checkIds(ids, name, where);
    const { maxPosition } = this.plan.config;
    if (ids.length + room > maxPosition) {
      throw new WhetError(`${where}: ${name} has ${ids.length} tokens, expected at most ${maxPosition - room} with contextLength=${maxPosition}. Shorten it, or load the model with a larger contextLength.`);
    }
  }

  private checkAdapter(adapter: number, where: string): void {
    if (adapter === 0 || this.adapters.has(adapter)) return;
    throw new WhetError(`${where}: adapter is ${adapter}, which is not loaded. Pass a number that loadAdapter returned.`);
  }

  /** Add a request. The core rejects it if it can never fit in the KV cache. */
  private add<A>(where: string, request: (core: Core, args: A) => number, args: A): number {
    try {
      return request(this.core, args);
    } catch (error) {
      if (!(error instanceof CoreError)) throw error;
      throw new WhetError(`${where}: ${error.message.replace("kv_bytes", "kvBytes")}. Shorten the prompt or maxNewTokens, or load the model with larger kvBytes.`);
    }
  }

  /** Sample completions and emit the tokens after every step. */
  async generate(request: Request, signal: AbortSignal, emit: (tokens: Token[]) => void): Promise<void> {
    const where = "Engine.generate";
    const { sampling, n, adapter } = request;
    const prompt = this.encodePrompt(request.prompt, request.options, where);
    this.checkLength(prompt, "prompt", 1, where);
    const own = request.usesModelStops ? this.getTokenizer(where).stopIds : [];
    const named = sampling.stop.length > 0 ? this.passTokenTexts(where).findSpecial(sampling.stop) : [];
    this.checkIds(sampling.stopTokenIds, "stopTokenIds", where);
    const stops = Int32Array.from(new Set([...sampling.stopTokenIds, ...own, ...named]));
    this.checkIds(sampling.logitBias.map(([token]) => token), "logitBias", where);
    if (sampling.minNewTokens > 0 && stops.length === this.plan.config.vocabSize) {
      throw new WhetError(`${where}: minNewTokens is ${sampling.minNewTokens}, but stopTokenIds has the whole vocabulary. Remove some.`);
    }
    this.checkAdapter(adapter, where);
    const strings = sampling.stop.map((text) => new TextEncoder().encode(text));
    const [minNewTokens, maxNewTokens] = [sampling.minNewTokens, sampling.maxNewTokens].map((count) => Math.min(count, this.plan.config.maxPosition));
    const [adapterId, promptIndex] = [BigInt(adapter), BigInt(request.promptIndex)];
    const stopLengths = strings.map((bytes) => bytes.length);
    const numbers = encode(promptFields, { ...sampling, adapter: adapterId, n, minNewTokens, maxNewTokens, keep: true, promptIndex, stopLengths });
    const stopText = Uint8Array.from(strings.flatMap((bytes) => [...bytes]));
    const id = this.core.with([prompt, stops, stopText, numbers], (tokens, stopTokens, text, settings) =>
      this.add(where, engineCalls.add_prompt, { tokens, nTokens: prompt.length, stops: stopTokens, nStops: stops.length, stopText: text, numbers: settings, nNumbers: numbers.length }),
    );
    const texts = this.textStreams(n, where);
    const newTokens = (from: number, sample: number) => this.readTokens(id, sample, from, texts[sample], strings.length > 0, sampling.topLogprobs);
    const sent = Array<number>(n).fill(0);
    await this.runRequest(id, where, signal, () => {
      const drawn = sent.flatMap(newTokens);
      for (const { sample } of drawn) ++sent[sample];
      if (drawn.length > 0) emit(drawn);
    });
  }

  /** Run a request to its end, with a call of `readResults` before every step and after the last. */
  private async runRequest(id: number, where: string, signal: AbortSignal, readResults: () => void): Promise<void> {
    try {
      for (;;) {
        if (signal.aborted) throw signal.reason;
        const isDone = this.core.call("is_done", id) === 1;
        readResults();
        if (isDone) break;
        this.core.call("step");
        await yieldToEventLoop();
      }
      this.core.call("job_error", id);
      const error = this.core.result();
      if (error !== "") throw new WhetError(`${where}: ${error}`);
    } finally {
      this.core.call("remove", id);
    }
  }

  /** Return a decoder per sample; none if the tokenizer is not supported: prompts of token ids work without it. */
  private textStreams(n: number, where: string): TextStream[] {
    try {
      return Array.from({ length: n }, () => this.getTokenizer(where).stream());
    } catch {
      return [];
    }
  }

  /** Pass the texts of tokens, in which the core finds stop strings, to the core once. */
  private passTokenTexts(where: string): TokenTexts {
    const { texts } = this.getTokenizer(where);
    if (texts.noStopReason !== undefined) {
      throw new WhetError(`${where}: stop is not supported for this tokenizer: ${texts.noStopReason}. Pass stopTokenIds.`);
    }
    if (!this.hasTokenTexts) {
      const { bytes, ends } = texts.concatenate();
      this.core.with([bytes, ends], (at, end) => engineCalls.set_token_texts(this.core, { bytes: at, nBytes: bytes.length, ends: end, n: ends.length, dropsFirstSpace: +texts.dropsFirstSpace }));
      this.hasTokenTexts = true;
    }
    return texts;
  }

  private readTokens(id: number, sample: number, from: number, text: TextStream | undefined, hasStop: boolean, nTop: number): Token[] {
    const view = this.core.struct(sampleFields, this.core.call("sample", id, sample));
    const n = view.n - from;
    if (n === 0) return [];
    const tokens = this.core.integers(view.tokens + 4 * from, n);
    const logprobs = this.core.floats(view.logprobs + 4 * from, n);
    const withheld = hasStop ? this.core.integers(view.withheld + 4 * from, n) : undefined;
    const topAt = view.alternatives + 8 * from * nTop; // pairs of an id and a log-prob
    const [topIds, topLogprobs] = [this.core.integers(topAt, 2 * n * nTop), this.core.floats(topAt, 2 * n * nTop)];
    const finish = enums.finish[view.finish];
    return Array.from(tokens, (token, i) => {
      const isLast = i === n - 1 && finish !== "running" && finish !== "cancelled";
      const top = Array.from({ length: nTop }, (_, j) => 2 * (i * nTop + j)).filter((at) => topIds[at] >= 0);
      return {
        sample,
        token,
        text: text?.add(token, withheld?.[i] ?? 0, isLast) ?? "",
        logprob: logprobs[i],
        ...(nTop > 0 ? { topLogprobs: top.map((at) => ({ token: topIds[at], logprob: topLogprobs[at + 1] })) } : {}),
        ...(isLast ? { finish } : {}),
      };
    });
  }

  async logprobs({ prompt, start, temperature, adapter }: Extract<Call, { method: "logprobs" }>, signal: AbortSignal): Promise<Float32Array> {
    const where = "Engine.logprobs";
    const tokens = this.encodePrompt(prompt, {}, where);
    this.checkLength(tokens, "tokens", 0, where);
    this.checkAdapter(adapter, where);
    if (start > tokens.length) throw new WhetError(`${where}: start is ${start}, expected 1 to ${tokens.length}, the number of tokens.`);
    const id = this.core.with([tokens], (at) => this.add(where, engineCalls.add_score, { tokens: at, n: tokens.length, scoreFrom: start, temperature, adapterId: adapter }));
    let found = new Float32Array();
    await this.runRequest(id, where, signal, () => (found = this.core.floats(this.core.call("scores", id), tokens.length - start)));
    return found;
  }

  async loadAdapter(files: Files, from: DownloadOptions): Promise<number> {
    return this.addAdapter(await this.readAdapter(files, from));
  }

  private async readAdapter(files: Files, from: DownloadOptions): Promise<LoraFactors[]> {
    const readers: Reader[] = [];
    try {
      const { adapterFiles, readAdapter } = await loadHf();
      const [[, first], ...others] = files;
      const all = others.length === 0 && (await isFolder(first)) ? adapterFiles(String(first)) : files;
      for (const [name, file] of all) readers.push({ ...(await openReader(name, file, from)), name });
      return await readAdapter(this.core, readers, this.plan.config, this.plan.family, from.where);
    } finally {
      await closeAll(readers);
    }
  }

  private addAdapter(factors: LoraFactors[]): number {
    this.core.call("begin_adapter");
    for (const { layer, target, firstRow, rank, a, b, scaling } of factors) {
      const factor = Math.fround(scaling);
      const scaled = b.map((x) => factor * x); // float32 times float32, rounded once as in Python
      this.core.with([a, scaled], (down, up) =>
        engineCalls.add_adapter_part(this.core, { layer, target: enums.target.indexOf(target), firstRow, a: down, b: up, rank, k: a.length / rank, n: b.length / rank }),
      );
    }
    this.core.call("end_adapter", this.nextAdapter);
    this.adapters.add(this.nextAdapter);
    return this.nextAdapter++;
  }

  removeAdapter(adapter: number): void {
    this.checkAdapter(adapter, "Engine.removeAdapter");
    this.core.call("remove_adapter", adapter);
    this.adapters.delete(adapter);
  }

  /** Run an action of the learner. */
  async learn(request: LearnRequest, from: DownloadOptions): Promise<unknown> {
    const { action, given, where } = request;
    if (action === "create") return this.createLearner(given, from);
    if (action === "encode") return given.map((example, i) => this.encodeExample(example, `${where}: rows[${i}]`));
    if (this.learner === undefined) throw new WhetError(`${where}: the learner is closed. Create another: engine.learner().`);
    const found = await this.learner.run(request);
    if (action === "close") this.learner = undefined;
    return found;
  }

  private async createLearner({ files, ...settings }: AdapterSettings, from: DownloadOptions): Promise<LearnerInfo> {
    const { core, plan } = this;
    const { where } = from;
    if (this.staticInfo.build !== "learner") throw new WhetError(`${where}: the engine was loaded without the learner. Pass learning: true to Engine.load.`);
    const { LearnerHost } = await loadLearner();
    const modules = (await loadHf()).locateModules(plan.config, plan.family);
    const saved = files === undefined ? undefined : await this.readAdapter(files, from);
    if (this.learner !== undefined) throw new WhetError(`${where}: the engine has a learner already. Close it first: learner.close().`);
    this.learner = new LearnerHost({ core, ...plan, modules, name: this.name, weights: this.weights, addAdapter: (factors) => this.addAdapter(factors), removeAdapter: (adapter) => { if (this.adapters.has(adapter)) this.removeAdapter(adapter); } }, settings, saved, where);
    return this.learner.info;
  }

  /** Return the token ids of a prompt and its completion, as whet.data.tokenize_completion. Texts are tokenised jointly; a token
   * across the boundary belongs to the completion. */
  private encodeExample({ prompt, completion = new Int32Array() }: Example, where: string): Row {
    const opened = [...this.encodePrompt(prompt, {}, where)];
    let whole: number[];
    if (typeof completion !== "string") whole = [...opened, ...completion];
    else if (typeof prompt === "string") whole = this.encodeText(prompt + completion, where);
    else if (Array.isArray(prompt)) whole = [...this.encodePrompt([...prompt, { role: "assistant", content: completion }], { addGenerationPrompt: false }, where)];
    else throw new WhetError(`${where} has token ids as prompt and a text as completion. Pass both as token ids, or both as texts.`);
    this.checkLength(Int32Array.from(whole), "prompt with completion", 0, where);
    const shared = typeof completion === "string" ? opened.findIndex((id, i) => id !== whole[i]) : -1;
    const n = shared < 0 ? opened.length : Math.max(1, shared);
    return { prompt: whole.slice(0, n), completion: whole.slice(n) };
  }

  /** Return the token ids of a text with EOS. */
  private encodeText(text: string, where: string): number[] {
    const { eosId } = this.getTokenizer(where);
    if (eosId === undefined) throw new WhetError(`${where} is a text, and the tokenizer has no EOS token, so the model could not learn to end. Pass token ids.`);
    const ids = [...this.encodePrompt(text, {}, where)];
    return ids.at(-1) === eosId ? ids : [...ids, eosId];
  }
}

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

function weightsBytesOf(core: Core, { config, formats }: Sized): number {
  const known = weightFormats(core);
  let bytes = 0;
  for (const [slot, shape] of slots(config)) {
    const spans = formats.get(slot);
    if (spans === undefined) bytes += 4 * shape[0];
    for (const { rows, format } of spans ?? []) bytes += rows * rowBytes(known.get(format)!, shape[1]);
  }
  return Math.round(bytes);
}

/** Check that weights and KV cache fit in the core's 32-bit memory. */
function checkMemory(core: Core, plan: Sized & Pick<Plan, "pageBytes">, kvBytes: number): void {
  const minBytes = 2 * plan.pageBytes;
  if (kvBytes < minBytes) throw new WhetError(`Engine.load: kvBytes is ${kvBytes}, expected at least ${minBytes}: a page for the prompt and one for its sample.`);
  const weightsBytes = weightsBytesOf(core, plan);
  if (weightsBytes + kvBytes < core.maxBytes) return;
  const mb = (bytes: number) => `${Math.ceil(bytes / 1e6)} MB`;
  throw new OutOfMemoryError(
    `Engine.load: weights take ${mb(weightsBytes)} and the KV cache ${mb(kvBytes)} with contextLength=${plan.config.maxPosition}, expected at most ${mb(core.maxBytes)} in total. Load a smaller model, or pass a smaller contextLength or kvBytes.`,
  );
}

type AnyReader = ModelReader | FolderReader;

/** Open a model's files. `headersOnly`: download only the ranges that are read. */
async function open(files: Files, from: DownloadOptions, headersOnly: boolean): Promise<AnyReader> {
  const hasFolder = files.length === 1 ? await isFolder(files[0][1]) : files.some(([name]) => /(^|\/)config\.json$/.test(name));
  if (!hasFolder) return openModel(files, from, { headersOnly });
  const openOne = headersOnly ? openRanges : openReader;
  const unlessMissing = (error: unknown) => {
    if (!(error instanceof MissingFileError)) throw error;
    return undefined;
  };
  const openers = { join, open: (name: string, file: Files[number][1]) => openOne(name, file, from).catch(unlessMissing) };
  return (await loadHf()).openFolder(files, from, headersOnly, openers);
}

async function makePlan(core: Core, reader: AnyReader, { contextLength, weights }: LoadOptions, headersOnly: boolean, where: string): Promise<Plan> {
  const lengthOf = (trained: number) => contextLength ?? Math.min(trained, DEFAULT_MAX_CONTEXT);
  const model = "folder" in reader ? await readFolderModel(core, reader, lengthOf, headersOnly, where) : await readGgufModel(core, reader, lengthOf, where);
  const types = storedTypes(core);
  const formats = chooseFormats(core, model.config, model.slices, types, weights, where);
  const numbers = encodeConfig(model.config);
  core.with([numbers], (at) => core.call("begin_model", at, numbers.length));
  return { ...model, types, formats, pageBytes: core.call("kv_page_bytes", +hasBf16Cache(formats)) };
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
  const length = lengthOf(Number(metadata.get(`${architecture}.context_length`)));
  return {
    ...(await describeGguf(core, file, reader, length, caller)),
    architecture,
    hasChatTemplate: metadata.has("tokenizer.chat_template"),
    tokenizer: (where) => TextTokenizer.fromGguf(metadata, where),
  };
}

function describePlan({ architecture, config, formats }: Pick<Plan, "architecture" | "config" | "formats">) {
  return {
    architecture,
    parameters: [...slots(config).values()].reduce((sum, shape) => sum + shape.reduce((a, b) => a * b), 0),
    contextLength: config.maxPosition,
    formats: [...new Set([...formats.values()].flatMap((spans) => spans.map((span) => span.format)))],
  };
}

const hasBf16Cache = (formats: Map<string, FormatSpan[]>) => formats.get("layers.0.o")!.some((span) => span.format !== "float32");

async function startThread(core: Core, startWorker: (port: MessagePort) => void): Promise<void> {
  const { port1, port2 } = new MessageChannel();
  startWorker(port2);
  port1.postMessage(core.newThread());
  await new Promise((resolve) => (port1.onmessage = resolve));
  port1.close();
}

function allocateWeights(core: Core, config: ModelConfig, formats: Map<string, FormatSpan[]>): void {
  const known = weightFormats(core);
  for (const [slot, shape] of slots(config)) {
    core.withText(slot, (at, n) => {
      const spans = formats.get(slot);
      if (spans === undefined) return core.call("add_vector", at, n, shape[0]);
      for (const span of spans) engineCalls.add_matrix(core, { slot: at, size: n, format: known.get(span.format)!.index, n: span.rows, k: shape[1] });
      return 0;
    });
  }
  core.call("allocate_weights");
}

/** Copy a slice's rows into the core's memory and pack them. */
function pack(core: Core, slice: RowSlice, bytes: Uint8Array, types: Map<string, StoredType>, where: string): void {
  const { tensor, row, count, stride, isTransposed } = slice;
  const type = types.get(slice.offset === 0 ? tensor.type : "F32")!;
  const isVector = tensor.shape.length === 1;
  if (isVector && !isFloat(type)) throw new WhetError(`Engine.load: ${where}: ${tensor.name} is ${tensor.type}, expected floats for a norm or bias.`);
  const k = tensor.shape[tensor.shape.length - 1];
  const storedBytes = isVector || isTransposed ? type.blockBytes : (k / type.block) * type.blockBytes;
  const width = isFloat(type) ? k : storedBytes;
  const [n, length, rowStride, columnStride] = isTransposed ? [count, tensor.shape[0], 1, k] : isVector ? [1, count, 0, stride] : [count, width, width * stride, 1];
  const rows = bytes.subarray(row * storedBytes, isTransposed ? undefined : (row + (count - 1) * stride + 1) * storedBytes);
  const isFinite = core.withText(slice.slot, (slot, size) =>
    core.with([rows], (data) =>
      engineCalls.pack(core, { slot, size, first: slice.firstRow, type: type.index, data, n, width: length, rowStride, columnStride }),
    ),
  );
  if (isFinite === 0) throw new WhetError(`Engine.load: ${where}: ${tensor.name} contains NaN or infinity. Save the model again.`);
}
