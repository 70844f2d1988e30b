/** The engine itself, in a worker of its own: a model in the core's memory, and the requests that run on it. */
import { Core } from "./core.js";
import { WhetError } from "./errors.js";
import { describe, type Piece, readGguf } from "./gguf.js";
import { configNumbers, type ModelConfig, slots } from "./model.js";
import { breathe, isNode, startThreadWorker, type WorkerPort } from "./port.js";
import type { AdapterPart, Info, LoadOptions, Sampling, Token } from "./protocol.js";
import { openReader, type Progress, type Source } from "./reader.js";

const CHUNK = 64; // tokens of prompts in a step
const FINISH = [undefined, "stop", "length", "cancelled"] as const;
const TARGETS = ["qkv", "o", "up", "down"];

interface StoredType {
  name: string;
  index: number;
  block: number;
  blockBytes: number;
  packedAs: string;
}

const isFloat = (type: StoredType) => type.block === 1;

export class Host {
  private readonly threads: WorkerPort[] = [];
  private adapters = 0;

  private constructor(
    private readonly core: Core,
    private readonly config: ModelConfig,
    private readonly about: Omit<Info, "memoryBytes">,
  ) {}

  static async load(source: Source, options: LoadOptions, isolated: boolean, progress: Progress, signal: AbortSignal): Promise<Host> {
    const { core, build } = await startCore(isolated);
    const reader = await openReader(source, progress, signal);
    try {
      const file = await readGguf(core, reader);
      const trained = file.metadata.get(`${String(file.metadata.get("general.architecture"))}.context_length`);
      const contextLength = options.contextLength ?? Math.min(Number(trained), 4096);
      const { config, pieces } = await describe(core, file, reader, contextLength);
      const threads: WorkerPort[] = [];
      const n = build === "threads" && isolated ? (options.threads ?? Math.max(1, Math.floor(navigator.hardwareConcurrency / 2))) : 1;
      for (let i = 1; i < n; ++i) threads.push(await startThread(core));
      core.call("set_threads", n);
      const types = storedTypes(core);
      const formats = chooseFormats(config, pieces, types);
      allocate(core, config, formats);
      let loadedBytes = 0;
      let last: { piece: Piece; bytes: Uint8Array } | undefined;
      for (const piece of pieces) {
        if (signal.aborted) throw signal.reason;
        if (last?.piece.tensor !== piece.tensor) {
          const bytes = await reader.read(piece.tensor.offset, piece.tensor.sizeBytes);
          loadedBytes += bytes.length;
          last = { piece, bytes };
          progress({ loadedBytes, totalBytes: reader.size });
        }
        pack(core, piece, last.bytes, types, reader.name);
      }
      const bf16 = [...formats].some(([slot, parts]) => slot === "layers.0.o" && parts.some((part) => part.format !== "float32"));
      const page = core.call("kv_page_bytes", +bf16);
      const maxBatch = options.maxBatch ?? 4;
      // A sequence of all its tokens, and the page that a further sample begins with.
      const kvBytes = options.kvBytes ?? page * (Math.ceil(contextLength / 64) + 2 * maxBatch);
      core.call("begin_engine", kvBytes, maxBatch, CHUNK, +bf16);
      const host = new Host(core, config, {
        architecture: String(file.metadata.get("general.architecture")),
        parameters: [...slots(config).values()].reduce((sum, shape) => sum + shape.reduce((a, b) => a * b), 0),
        contextLength,
        vocabSize: config.vocabSize,
        threads: n,
        build,
        exact: core.call("is_fused") === 1,
        formats: [...new Set([...formats.values()].flatMap((parts) => parts.map((part) => part.format)))],
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

  /** Samples; each token as soon as a step has drawn it. */
  async generate(prompt: Int32Array, sampling: Sampling, signal: AbortSignal, emit: (tokens: Token[]) => void): Promise<void> {
    const n = sampling.n ?? 1;
    const stops = Int32Array.from(sampling.stopTokens ?? []);
    const room = this.config.maxPosition - prompt.length;
    if (room < 1) {
      throw new WhetError(`Engine.generate: the prompt has ${prompt.length} tokens, and contextLength is ${this.config.maxPosition}. Load the model with a longer one.`);
    }
    const numbers = Float64Array.from([
      sampling.adapter ?? 0, n, sampling.minNewTokens ?? 0, sampling.maxNewTokens ?? room, 1, sampling.seed ?? 0,
      sampling.promptIndex ?? 0, sampling.temperature ?? 1, sampling.topP ?? 1, sampling.minP ?? 0,
      sampling.repetitionPenalty ?? 1, sampling.presencePenalty ?? 0, sampling.frequencyPenalty ?? 0, sampling.topK ?? 0,
    ]);
    const id = this.core.with([prompt, stops, numbers], (tokens, stop, settings) =>
      this.core.call("add_prompt", tokens, prompt.length, stop, stops.length, settings, numbers.length),
    );
    const sent = Array<number>(n).fill(0);
    try {
      while (!signal.aborted) {
        const isDone = this.core.call("is_done", id) === 1;
        const drawn = sent.flatMap((from, sample) => this.drawnSince(id, sample, from));
        for (const { sample } of drawn) ++sent[sample];
        if (drawn.length > 0) emit(drawn);
        if (isDone) break;
        this.core.call("step");
        await breathe();
      }
      this.core.call("job_error", id);
      const error = this.core.result();
      if (error !== "") throw new WhetError(`Engine.generate: ${error}`);
      if (signal.aborted) throw signal.reason;
    } finally {
      this.core.call("remove", id);
    }
  }

  private drawnSince(id: number, sample: number, from: number): Token[] {
    const n = this.core.call("sample_size", id, sample);
    if (n === from) return [];
    const tokens = this.core.integers(this.core.call("sample_tokens", id, sample), n);
    const logprobs = this.core.floats(this.core.call("sample_logprobs", id, sample), n);
    const finish = FINISH[this.core.call("sample_finish", id, sample)];
    return Array.from({ length: n - from }, (_, i) => ({
      sample,
      token: tokens[from + i],
      logprob: logprobs[from + i],
      ...(from + i === n - 1 && finish !== undefined ? { finish } : {}),
    }));
  }

  async logprobs(tokens: Int32Array, scoreFrom: number, temperature: number, adapter: number, signal: AbortSignal): Promise<Float32Array> {
    const id = this.core.with([tokens], (at) => this.core.call("add_score", at, tokens.length, scoreFrom, temperature, adapter));
    try {
      while (this.core.call("is_done", id) === 0) {
        this.core.call("step");
        await breathe();
        if (signal.aborted) throw signal.reason;
      }
      return this.core.floats(this.core.call("scores", id), tokens.length - scoreFrom);
    } finally {
      this.core.call("remove", id);
    }
  }

  loadAdapter(parts: AdapterPart[]): number {
    this.core.call("begin_adapter");
    for (const { layer, target, firstRow, rank, a, b } of parts) {
      this.core.with([a, b], (down, up) =>
        this.core.call("add_adapter_part", layer, TARGETS.indexOf(target), firstRow, down, up, rank, a.length / rank, b.length / rank),
      );
    }
    this.core.call("end_adapter", ++this.adapters);
    return this.adapters;
  }

  removeAdapter(adapter: number): void {
    this.core.call("remove_adapter", adapter);
  }
}

/** The module that this engine of WebAssembly runs: relaxed SIMD and threads, or SIMD128 alone. */
async function startCore(isolated: boolean): Promise<{ core: Core; build: "threads" | "plain" }> {
  for (const [build, url] of [["threads", new URL("./threads.wasm", import.meta.url)], ["plain", new URL("./plain.wasm", import.meta.url)]] as const) {
    if (build === "threads" && (!isolated || (isNode && process.env.WHET_WEB_BUILD === "plain"))) continue;
    const bytes = await fetchBytes(url);
    if (!WebAssembly.validate(bytes)) continue;
    return { core: await Core.create(await WebAssembly.compile(bytes), build === "threads"), build };
  }
  throw new WhetError("Engine.load: this WebAssembly engine has no SIMD. Use Chrome 91, Firefox 89, Safari 16.4, Node 18 or later.");
}

async function fetchBytes(url: URL): Promise<Uint8Array<ArrayBuffer>> {
  if (url.protocol === "file:") return new Uint8Array(await (await import("node:fs/promises")).readFile(url));
  const response = await fetch(url);
  if (!response.ok) throw new WhetError(`Engine.load: ${url.href} answered ${response.status}. Serve the package's wasm files beside its scripts.`);
  return new Uint8Array(await response.arrayBuffer());
}

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

function storedTypes(core: Core): Map<string, StoredType> {
  const rows = core.json<[string, string, number, number, string][]>("stored_types");
  return new Map(rows.map(([name, gguf, block, blockBytes, packedAs], index) => [gguf, { name, index, block, blockBytes, packedAs }]));
}

interface Part {
  rows: number;
  format: string;
}

/** Formats of every matrix, from its first row on: quantised rows stay what they are, floats are taken as bfloat16. */
function chooseFormats(config: ModelConfig, pieces: Piece[], types: Map<string, StoredType>): Map<string, Part[]> {
  const found = new Map<string, Part[]>();
  const sorted = [...pieces].sort((a, b) => a.firstRow - b.firstRow);
  for (const [slot, shape] of slots(config)) if (shape.length === 2) found.set(slot, []);
  for (const piece of sorted) {
    const parts = found.get(piece.slot);
    if (parts === undefined) continue;
    const type = types.get(piece.tensor.type)!;
    const format = piece.slot === "positions" ? "float32" : isFloat(type) ? "bfloat16" : type.packedAs;
    const last = parts[parts.length - 1];
    if (last?.format === format) last.rows += piece.count;
    else parts.push({ rows: piece.count, format });
  }
  return found;
}

function allocate(core: Core, config: ModelConfig, formats: Map<string, Part[]>): void {
  const numbers = configNumbers(config);
  core.with([numbers], (at) => core.call("begin_model", at, numbers.length));
  const index = core.json<[string, number][]>("weight_formats").map(([name]) => name);
  for (const [slot, shape] of slots(config)) {
    core.withText(slot, (at, n) => {
      const parts = formats.get(slot);
      if (parts === undefined) return core.call("add_vector", at, n, shape[0]);
      for (const part of parts) core.call("add_matrix", at, n, index.indexOf(part.format), part.rows, shape[1]);
      return 0;
    });
  }
  core.call("allocate_weights");
}

/** Copies a piece's rows into the core's memory, some at a time, and packs them. */
function pack(core: Core, piece: Piece, bytes: Uint8Array, types: Map<string, StoredType>, where: string): void {
  const { tensor, count, every } = piece;
  const type = types.get(tensor.type)!;
  const isVector = tensor.shape.length === 1;
  const k = tensor.shape[tensor.shape.length - 1];
  const rowBytes = isVector ? type.blockBytes : (k / type.block) * type.blockBytes;
  const most = isVector ? count : Math.max(16, Math.floor((4 << 20) / (rowBytes * every) / 16) * 16);
  for (let done = 0; done < count; done += most) {
    const n = Math.min(most, count - done);
    const begin = (piece.row + done * every) * rowBytes;
    const some = bytes.subarray(begin, begin + ((n - 1) * every + 1) * rowBytes);
    const width = isFloat(type) ? k : rowBytes;
    const isFinite = core.withText(piece.slot, (slot, size) =>
      core.with([some], (at) =>
        isVector
          ? core.call("pack", slot, size, piece.firstRow + done, type.index, at, 1, n, 0, every)
          : core.call("pack", slot, size, piece.firstRow + done, type.index, at, n, width, width * every, 1),
      ),
    );
    if (isFinite === 0) throw new WhetError(`Engine.load: ${where}: ${tensor.name} holds NaN or infinity. Look at what made it.`);
  }
}
