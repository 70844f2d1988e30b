/** The engine itself, in a worker of its own: a model in the core's memory, and the requests that run on it. */
import { type Core, CoreError } from "./core.js";
import { MissingFileError, OutOfMemoryError, WhetError } from "./errors.js";
import type { FolderReader } from "./folder.js";
import { chooseFormats, isFloat, type Part, type StoredType, storedTypes, weightFormats } from "./formats.js";
import { describe } from "./gguf.js";
import { configNumbers, type Family, type ModelConfig, slots } from "./model.js";
import { join, type ModelReader, openModel, readHeads } from "./parts.js";
import type { Piece } from "./pieces.js";
import { breathe, loadHf, nProcessors, startThreadWorker, type WorkerPort } from "./port.js";
import { startCore } from "./start.js";
import type { Call, Estimate, Files, Info, LoadOptions, Measure, PromptOptions, Request, Token } from "./protocol.js";
import { isFolder, openReader, type Range, type Reader, readRanges } from "./sources.js";
import { type DownloadOptions, openRanges } from "./download.js";
import { type Message, TextTokenizer } from "./tokenizer.js";
import type { TextStream, TokenTexts } from "./token_texts.js";

const CHUNK = 64; // tokens of prompts in a step
const FINISH = [undefined, "stop", "length"] as const; // as the core counts them; a cancelled request has no further tokens
const MOST_CONTEXT = 4096; // tokens, where the caller says nothing
const PAGE_TOKENS = 64;

/** A model as its files describe it. */
interface Model {
  architecture: string;
  config: ModelConfig;
  family: Family;
  pieces: Piece[];
  hasChatTemplate: boolean;
  tokenizer(where: string): TextTokenizer;
}

/** A model, and what the engine makes of it. */
interface Plan extends Model {
  formats: Map<string, Part[]>;
  types: Map<string, StoredType>;
  /** Keys and values of PAGE_TOKENS tokens. */
  pageBytes: number;
}

type Sized = Pick<Plan, "config" | "formats">;

const BLOCK_BYTES = 1 << 20;

/** A matrix as rows that are read and packed at a time, each a tensor of its own: a head is a third of some files. */
function cut(piece: Piece): Piece[] {
  const { tensor, row, count, firstRow } = piece;
  if (tensor.shape.length !== 2 || piece.isTransposed || piece.every !== 1) return [piece];
  const rowBytes = tensor.sizeBytes / tensor.shape[0];
  const most = Math.max(16, Math.floor(BLOCK_BYTES / rowBytes / 16) * 16);
  return Array.from({ length: Math.ceil(count / most) }, (_, i) => {
    const n = Math.min(most, count - i * most);
    const rows = { ...tensor, shape: [n, tensor.shape[1]], offset: tensor.offset + (row + i * most) * rowBytes, sizeBytes: n * rowBytes };
    return { ...piece, tensor: rows, row: 0, count: n, firstRow: firstRow + i * most };
  });
}

interface Block extends Range {
  pieces: Piece[];
}

/** Pieces and the bytes of their tensors, in the order of the file. */
async function* withBytes(pieces: Piece[], reader: Reader): AsyncGenerator<[Piece, Uint8Array]> {
  const blocks: Block[] = [];
  for (const piece of pieces.flatMap(cut).sort((a, b) => a.tensor.offset - b.tensor.offset)) {
    const begin = piece.tensor.offset;
    const end = begin + piece.tensor.sizeBytes;
    const last = blocks.at(-1);
    // Without a gap, so that a block lies in one file of several: each begins with a head.
    if (last !== undefined && begin <= last.end && (end <= last.end || end - last.begin <= BLOCK_BYTES)) {
      last.pieces.push(piece);
      last.end = Math.max(last.end, end);
    } else {
      blocks.push({ begin, end, pieces: [piece] });
    }
  }
  for await (const [{ begin, pieces }, bytes] of readRanges(reader, blocks)) {
    for (const piece of pieces) {
      const at = piece.tensor.offset - begin;
      yield [piece, bytes.subarray(at, at + piece.tensor.sizeBytes)];
    }
  }
}

export class Host {
  private readonly threads: WorkerPort[] = [];
  private readonly adapters = new Set<number>();
  private nextAdapter = 1;
  private tokenizer: TextTokenizer | undefined;
  private hasTokenTexts = false; // in the core

  private constructor(
    private readonly core: Core,
    private readonly plan: Omit<Plan, "pieces">,
    private readonly about: Omit<Info, "memoryBytes">,
  ) {}

  static async load(files: Files, options: LoadOptions, isolated: boolean, from: DownloadOptions): Promise<Host> {
    const { core, build } = await startCore(isolated, "Engine.load");
    const reader = await open(files, from, false);
    try {
      const { pieces, ...plan } = await makePlan(core, reader, options, false, from.where);
      const { config, formats, types } = plan;
      const maxBatch = options.maxBatch ?? 4;
      // A sequence of all its tokens, and the page that a further sample begins with.
      const kvBytes = options.kvBytes ?? plan.pageBytes * (Math.ceil(config.maxPosition / PAGE_TOKENS) + 2 * maxBatch);
      checkFits(core, plan, kvBytes);
      const threads: WorkerPort[] = [];
      const n = build !== "plain" ? (options.threads ?? Math.max(1, Math.floor(nProcessors() / 2))) : 1;
      for (let i = 1; i < n; ++i) threads.push(await startThread(core));
      core.call("set_threads", n);
      allocate(core, config, formats);
      for await (const [piece, stored] of withBytes(pieces, reader)) {
        if (from.signal.aborted) throw from.signal.reason;
        const { offset, tensor } = piece;
        const bytes = offset === 0 ? stored : new Uint8Array((await loadHf()).toFloats(stored, tensor, reader.name).map((x) => x + offset).buffer);
        pack(core, piece, bytes, types, reader.name);
        from.onProgress({ loadedBytes: tensor.offset + tensor.sizeBytes, totalBytes: reader.size, phase: "pack" });
      }
      core.call("begin_engine", kvBytes, maxBatch, CHUNK, +hasBf16Cache(formats));
      const host = new Host(core, plan, {
        ...describePlan(plan),
        vocabSize: config.vocabSize,
        threads: n,
        build,
        exact: core.call("is_fused") === 1,
        hasChatTemplate: plan.hasChatTemplate,
        weightsBytes: core.call("weights_bytes") >>> 0,
        kvBytes: core.call("kv_bytes") >>> 0,
      });
      host.threads.push(...threads);
      return host;
    } finally {
      await reader.close?.();
    }
  }

  info(): Info {
    return { ...this.about, memoryBytes: this.core.memoryBytes };
  }

  /** Made when text first comes: token ids need none. */
  private text(where: string): TextTokenizer {
    return (this.tokenizer ??= this.plan.tokenizer(where));
  }

  tokenize(text: string, addSpecialTokens: boolean): number[] {
    return this.text("Engine.tokenize").encode(text, addSpecialTokens);
  }

  detokenize(tokens: Int32Array): string {
    return this.text("Engine.detokenize").decode(tokens);
  }

  render(messages: Message[], options: PromptOptions): string {
    return this.text("Engine.render").render(messages, options, "Engine.render");
  }

  /** Tokens of the longest sequence that the KV cache holds, with the copy of the prompt's last page that a sample begins with. */
  private get kvTokens(): number {
    return (this.about.kvBytes / this.plan.pageBytes - 1) * PAGE_TOKENS;
  }

  measure(messages: Message[], options: PromptOptions): Measure {
    const { maxPosition } = this.plan.config;
    return { tokens: this.idsOf(messages, options, "Chat.send").length, context: Math.min(maxPosition, this.kvTokens) };
  }

  private idsOf(prompt: string | Message[] | Int32Array, options: PromptOptions, where: string): Int32Array {
    if (prompt instanceof Int32Array) return prompt;
    const tokenizer = this.text(where);
    const text = typeof prompt === "string" ? prompt : tokenizer.render(prompt, options, where);
    const ids = tokenizer.encode(text, typeof prompt === "string"); // a template writes its own special tokens
    if (ids.length === 0) throw new WhetError(`${where}: prompt has no tokens, expected at least one. Give a text that is not empty.`);
    return Int32Array.from(ids);
  }

  private checkIds(ids: Iterable<number>, name: string, where: string): void {
    const { vocabSize } = this.plan.config;
    for (const id of ids) {
      if (id < 0 || id >= vocabSize) throw new WhetError(`${where}: ${name} has the token ${id}, expected ids from 0 to ${vocabSize - 1}. Use the model's own tokenizer.`);
    }
  }

  private checkSequence(ids: Int32Array, name: string, room: number, where: string): void {
    this.checkIds(ids, name, where);
    const { maxPosition } = this.plan.config;
    if (ids.length + room > maxPosition) {
      throw new WhetError(`${where}: ${name} has ${ids.length} tokens, expected at most ${maxPosition - room} with contextLength=${maxPosition}. Shorten it, or load the model with a larger contextLength.`);
    }
  }

  private checkAdapter(adapter: number, where: string): void {
    if (adapter === 0 || this.adapters.has(adapter)) return;
    throw new WhetError(`${where}: adapter is ${adapter}, and there is no such adapter. Pass what loadAdapter returned.`);
  }

  /** Adds a request, which the core refuses if its keys and values could never be held. */
  private add(where: string, request: "add_prompt" | "add_score", ...args: number[]): number {
    try {
      return this.core.call(request, ...args);
    } catch (error) {
      if (!(error instanceof CoreError)) throw error;
      throw new WhetError(`${where}: ${error.message.replace("kv_bytes", "kvBytes")}. Shorten the prompt or maxNewTokens, or load the model with larger kvBytes.`);
    }
  }

  /** Samples; each token as soon as a step has drawn it. */
  async generate(request: Request, signal: AbortSignal, emit: (tokens: Token[]) => void): Promise<void> {
    const where = "Engine.generate";
    const { sampling, n, adapter } = request;
    const prompt = this.idsOf(request.prompt, request.options, where);
    this.checkSequence(prompt, "prompt", 1, where);
    const own = request.stopsByItself ? this.text(where).stopIds : [];
    const named = sampling.stop.length > 0 ? this.prepareStop(where).specialAmong(sampling.stop) : [];
    this.checkIds(sampling.stopTokenIds, "stopTokenIds", where);
    const stops = Int32Array.from(new Set([...sampling.stopTokenIds, ...own, ...named]));
    this.checkIds(sampling.logitBias.map(([token]) => token), "logitBias", where);
    if (sampling.minNewTokens > 0 && stops.length === this.plan.config.vocabSize) {
      throw new WhetError(`${where}: minNewTokens is ${sampling.minNewTokens}, and stopTokenIds has the whole vocabulary: no token may be drawn. Leave some out.`);
    }
    this.checkAdapter(adapter, where);
    const strings = sampling.stop.map((text) => new TextEncoder().encode(text));
    const numbers = Float64Array.from([
      adapter, n, ...[sampling.minNewTokens, sampling.maxNewTokens].map((count) => Math.min(count, this.plan.config.maxPosition)), 1, Number(sampling.seed >> 32n), Number(sampling.seed & 0xffffffffn),
      request.promptIndex, sampling.temperature, sampling.topP, sampling.minP, sampling.repetitionPenalty, sampling.presencePenalty,
      sampling.frequencyPenalty, sampling.topK, sampling.topLogprobs, sampling.logitBias.length, ...sampling.logitBias.flat(),
      strings.length, ...strings.map((bytes) => bytes.length),
    ]);
    const stopText = Uint8Array.from(strings.flatMap((bytes) => [...bytes]));
    const id = this.core.with([prompt, stops, stopText, numbers], (tokens, stop, text, settings) =>
      this.add(where, "add_prompt", tokens, prompt.length, stop, stops.length, text, settings, numbers.length),
    );
    const texts = this.textStreams(n, where);
    const drawnSince = (from: number, sample: number) => this.drawnSince(id, sample, from, texts[sample], strings.length > 0, sampling.topLogprobs);
    const sent = Array<number>(n).fill(0);
    try {
      while (!signal.aborted) {
        const isDone = this.core.call("is_done", id) === 1;
        const drawn = sent.flatMap(drawnSince);
        for (const { sample } of drawn) ++sent[sample];
        if (drawn.length > 0) emit(drawn);
        if (isDone) break;
        this.core.call("step");
        await breathe();
      }
      if (signal.aborted) throw signal.reason;
      this.core.call("job_error", id);
      const error = this.core.result();
      if (error !== "") throw new WhetError(`${where}: ${error}`);
    } finally {
      this.core.call("remove", id);
    }
  }

  /** None where the file has no tokenizer that is read: a prompt of token ids does without. */
  private textStreams(n: number, where: string): TextStream[] {
    try {
      return Array.from({ length: n }, () => this.text(where).stream());
    } catch {
      return [];
    }
  }

  /** The texts of tokens, which the core finds stop strings in; it is told them once. */
  private prepareStop(where: string): TokenTexts {
    const { texts } = this.text(where);
    if (texts.whyNoStop !== undefined) {
      throw new WhetError(`${where}: stop needs a tokenizer whose tokens have a text of their own, and that of this one is not known: ${texts.whyNoStop}. Pass stopTokenIds.`);
    }
    if (!this.hasTokenTexts) {
      const { bytes, ends } = texts.join();
      this.core.with([bytes, ends], (at, end) => this.core.call("set_token_texts", at, bytes.length, end, ends.length, +texts.dropsFirstSpace));
      this.hasTokenTexts = true;
    }
    return texts;
  }

  private drawnSince(id: number, sample: number, from: number, text: TextStream | undefined, isHeld: boolean, nTop: number): Token[] {
    const [size, tokensAt, logprobsAt, heldAt, topAt, ended] = this.core.integers(this.core.call("sample", id, sample), 6);
    const n = size - from;
    if (n === 0) return [];
    const tokens = this.core.integers(tokensAt + 4 * from, n);
    const logprobs = this.core.floats(logprobsAt + 4 * from, n);
    const held = isHeld ? this.core.integers(heldAt + 4 * from, n) : undefined;
    const [topIds, topLogprobs] = [this.core.integers(topAt + 8 * from * nTop, 2 * n * nTop), this.core.floats(topAt + 8 * from * nTop, 2 * n * nTop)];
    const finish = FINISH[ended];
    return Array.from(tokens, (token, i) => {
      const isLast = i === n - 1 && finish !== undefined;
      const top = Array.from({ length: nTop }, (_, j) => 2 * (i * nTop + j)).filter((at) => topIds[at] >= 0); // pairs of an id and a log-prob
      return {
        sample,
        token,
        text: text?.add(token, held?.[i] ?? 0, isLast) ?? "",
        logprob: logprobs[i],
        ...(nTop > 0 ? { topLogprobs: top.map((at) => ({ token: topIds[at], logprob: topLogprobs[at + 1] })) } : {}),
        ...(isLast ? { finish } : {}),
      };
    });
  }

  async logprobs({ prompt, start, temperature, adapter }: Extract<Call, { method: "logprobs" }>, signal: AbortSignal): Promise<Float32Array> {
    const where = "Engine.logprobs";
    const tokens = this.idsOf(prompt, {}, where);
    this.checkSequence(tokens, "tokens", 0, where);
    this.checkAdapter(adapter, where);
    if (start > tokens.length) throw new WhetError(`${where}: start is ${start}, expected 1 to ${tokens.length}, the number of tokens.`);
    const id = this.core.with([tokens], (at) => this.add(where, "add_score", at, tokens.length, start, temperature, adapter));
    try {
      while (this.core.call("is_done", id) === 0) {
        this.core.call("step");
        await breathe();
        if (signal.aborted) throw signal.reason;
      }
      return this.core.floats(this.core.call("scores", id), tokens.length - start);
    } finally {
      this.core.call("remove", id);
    }
  }

  async loadAdapter(files: Files, from: DownloadOptions): Promise<number> {
    const readers: Reader[] = [];
    try {
      const { adapterFiles, readAdapter, TARGETS } = await loadHf();
      const [[, first], ...others] = files;
      const all = others.length === 0 && (await isFolder(first)) ? adapterFiles(String(first)) : files;
      for (const [name, file] of all) readers.push({ ...(await openReader(name, file, from)), name });
      const parts = await readAdapter(this.core, readers, this.plan.config, this.plan.family, from.where);
      this.core.call("begin_adapter");
      for (const { layer, target, firstRow, rank, a, b } of parts) {
        this.core.with([a, b], (down, up) =>
          this.core.call("add_adapter_part", layer, TARGETS.indexOf(target), firstRow, down, up, rank, a.length / rank, b.length / rank),
        );
      }
      this.core.call("end_adapter", this.nextAdapter);
      this.adapters.add(this.nextAdapter);
      return this.nextAdapter++;
    } finally {
      for (const reader of readers) await reader.close?.();
    }
  }

  removeAdapter(adapter: number): void {
    this.checkAdapter(adapter, "Engine.removeAdapter");
    this.core.call("remove_adapter", adapter);
    this.adapters.delete(adapter);
  }
}

/** A model's memory, from the heads of its files. */
export async function estimate(files: Files, options: LoadOptions, from: DownloadOptions): Promise<Estimate> {
  const { core } = await startCore(false, "Engine.estimate");
  const reader = await open(files, from, true);
  try {
    const { pieces, ...plan } = await makePlan(core, reader, options, true, from.where);
    return { ...describePlan(plan), fileBytes: reader.size, weightsBytes: weightsBytesOf(core, plan), kvBytes: (plan.pageBytes / PAGE_TOKENS) * plan.config.maxPosition };
  } finally {
    await reader.close?.();
  }
}

function weightsBytesOf(core: Core, { config, formats }: Sized): number {
  const known = weightFormats(core);
  let bytes = 0;
  for (const [slot, shape] of slots(config)) {
    const parts = formats.get(slot);
    if (parts === undefined) bytes += 4 * shape[0];
    for (const { rows, format } of parts ?? []) bytes += rows * known.get(format)!.rowBytes(shape[1]);
  }
  return Math.round(bytes);
}

/** Sizes in the core have 32 bits. */
function checkFits(core: Core, plan: Sized & Pick<Plan, "pageBytes">, kvBytes: number): void {
  const least = 2 * plan.pageBytes;
  if (kvBytes < least) throw new WhetError(`Engine.load: kvBytes is ${kvBytes}, expected at least ${least}, the keys and values of a prompt and its sample.`);
  const weightsBytes = weightsBytesOf(core, plan);
  if (weightsBytes + kvBytes < core.mostBytes) return;
  const mb = (bytes: number) => `${Math.ceil(bytes / 1e6)} MB`;
  throw new OutOfMemoryError(
    `Engine.load: the weights take ${mb(weightsBytes)}, and keys and values ${mb(kvBytes)} with contextLength=${plan.config.maxPosition}; the engine's memory is ${mb(core.mostBytes)} at most. Load a smaller model, or pass a smaller contextLength or kvBytes.`,
  );
}

type AnyReader = ModelReader | FolderReader;

/** `headsOnly`: of URLs nothing is downloaded but what is read. */
async function open(files: Files, from: DownloadOptions, headsOnly: boolean): Promise<AnyReader> {
  const hasFolder = files.length === 1 ? await isFolder(files[0][1]) : files.some(([name]) => /(^|\/)config\.json$/.test(name));
  if (!hasFolder) return openModel(files, from, { headsOnly });
  const openOne = headsOnly ? openRanges : openReader;
  const unlessMissing = (error: unknown) => {
    if (!(error instanceof MissingFileError)) throw error;
    return undefined;
  };
  const openers = { join, open: (name: string, file: Files[number][1]) => openOne(name, file, from).catch(unlessMissing) };
  return (await loadHf()).openFolder(files, from, headsOnly, openers);
}

async function makePlan(core: Core, reader: AnyReader, { contextLength, weights }: LoadOptions, headsOnly: boolean, where: string): Promise<Plan> {
  const lengthOf = (trained: number) => contextLength ?? Math.min(trained, MOST_CONTEXT);
  const model = "folder" in reader ? await ofFolder(core, reader, lengthOf, headsOnly, where) : await ofGguf(core, reader, lengthOf, where);
  const types = storedTypes(core);
  const formats = chooseFormats(core, model.config, model.pieces, types, weights, where);
  const numbers = configNumbers(model.config);
  core.with([numbers], (at) => core.call("begin_model", at, numbers.length));
  return { ...model, types, formats, pageBytes: core.call("kv_page_bytes", +hasBf16Cache(formats)) };
}

async function ofFolder(core: Core, reader: FolderReader, lengthOf: (trained: number) => number, headsOnly: boolean, caller: string): Promise<Model> {
  const { describeFolder, hasTemplate, readFolderTokenizer } = await loadHf();
  return {
    ...(await describeFolder(core, reader, lengthOf, headsOnly, caller)),
    architecture: String(reader.folder.config.model_type),
    hasChatTemplate: hasTemplate(reader.folder, caller),
    tokenizer: (where) => readFolderTokenizer(reader.folder, TextTokenizer.ofFolder, where),
  };
}

async function ofGguf(core: Core, reader: ModelReader, lengthOf: (trained: number) => number, caller: string): Promise<Model> {
  const file = await readHeads(core, reader, caller);
  const { metadata } = file;
  const architecture = String(metadata.get("general.architecture"));
  const length = lengthOf(Number(metadata.get(`${architecture}.context_length`)));
  return {
    ...(await describe(core, file, reader, length, caller)),
    architecture,
    hasChatTemplate: metadata.has("tokenizer.chat_template"),
    tokenizer: (where) => TextTokenizer.ofGguf(metadata, where),
  };
}

function describePlan({ architecture, config, formats }: Pick<Plan, "architecture" | "config" | "formats">) {
  return {
    architecture,
    parameters: [...slots(config).values()].reduce((sum, shape) => sum + shape.reduce((a, b) => a * b), 0),
    contextLength: config.maxPosition,
    formats: [...new Set([...formats.values()].flatMap((parts) => parts.map((part) => part.format)))],
  };
}

const hasBf16Cache = (formats: Map<string, Part[]>) => formats.get("layers.0.o")!.some((part) => part.format !== "float32");

async function startThread(core: Core): Promise<WorkerPort> {
  const worker = await startThreadWorker();
  const thread = core.newThread();
  await new Promise<void>((resolve, reject) => {
    worker.onMessage(() => resolve());
    worker.onError(reject);
    worker.postMessage(thread);
  });
  return worker;
}

function allocate(core: Core, config: ModelConfig, formats: Map<string, Part[]>): void {
  const known = weightFormats(core);
  for (const [slot, shape] of slots(config)) {
    core.withText(slot, (at, n) => {
      const parts = formats.get(slot);
      if (parts === undefined) return core.call("add_vector", at, n, shape[0]);
      for (const part of parts) core.call("add_matrix", at, n, known.get(part.format)!.index, part.rows, shape[1]);
      return 0;
    });
  }
  core.call("allocate_weights");
}

/** Copies a piece's rows into the core's memory, and packs them. */
function pack(core: Core, piece: Piece, bytes: Uint8Array, types: Map<string, StoredType>, where: string): void {
  const { tensor, row, count, every, isTransposed } = piece;
  const type = types.get(piece.offset === 0 ? tensor.type : "F32")!;
  const isVector = tensor.shape.length === 1;
  if (isVector && !isFloat(type)) throw new WhetError(`Engine.load: ${where}: ${tensor.name} is ${tensor.type}, expected floats: norms and biases are not quantised.`);
  const k = tensor.shape[tensor.shape.length - 1];
  const rowBytes = isVector || isTransposed ? type.blockBytes : (k / type.block) * type.blockBytes;
  const width = isFloat(type) ? k : rowBytes;
  const layout = isTransposed ? [count, tensor.shape[0], 1, k] : isVector ? [1, count, 0, every] : [count, width, width * every, 1];
  const some = bytes.subarray(row * rowBytes, isTransposed ? undefined : (row + (count - 1) * every + 1) * rowBytes);
  const isFinite = core.withText(piece.slot, (slot, size) => core.with([some], (at) => core.call("pack", slot, size, piece.firstRow, type.index, at, ...layout)));
  if (isFinite === 0) throw new WhetError(`Engine.load: ${where}: ${tensor.name} holds NaN or infinity. Look at what made it.`);
}
