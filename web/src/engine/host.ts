/** Host of the core in the engine's worker: loads a model into its memory and runs requests. */
import { type Core, CoreError } from "../core/core.js";
import { WhetError } from "../core/errors.js";
import { encode } from "../core/fields.js";
import { nProcessors, yieldToEventLoop } from "../core/port.js";
import { startCore } from "../core/start.js";
import { engineCalls, enums, promptFields, sampleFields } from "../facts.js";
import { type Caller, closeAll, type DownloadOptions, type Reader } from "../files/reader.js";
import { type Files, isFolder, openReader } from "../files/sources.js";
import type { Program } from "../gpu/program.js";
import type { Row } from "../learner/batch.js";
import type { LearnerHost } from "../learner/host.js";
import type { AdapterSettings, Example, LearnerInfo, LearnRequest } from "../learner/protocol.js";
import type { LoraFactors } from "../models/adapters.js";
import type { Token } from "../settings/requests.js";
import type { TextStream, TokenTexts } from "../text/token_texts.js";
import type { Message, PromptOptions, TextTokenizer } from "../text/tokenizer.js";
import { loadGpu, loadHf, loadLearner } from "./chunks.js";
import { packWeights } from "./packing.js";
import { checkMemory, describePlan, makePlan, type ModelFiles, open, PAGE_TOKENS, type Plan, PREFILL_CHUNK } from "./plan.js";
import type { Call, Info, LoadOptions, Measure, Request } from "./protocol.js";
import { TokenRows } from "./token_rows.js";

export class Host {
  private readonly adapters = new Set<number>();
  private nextAdapter = 1;
  private tokenizer: TextTokenizer | undefined;
  private hasTokenTexts = false; // whether the core has the token texts
  private learner: LearnerHost | undefined;
  private lastTurn: Promise<unknown> = Promise.resolve(); // see inTurn

  private constructor(
    private readonly core: Core,
    private readonly plan: Omit<Plan, "slices">,
    private readonly staticInfo: Omit<Info, "memoryBytes">,
    /** Name or URL of the model. */
    private readonly name: string,
    private readonly weights: string | undefined,
    /** Rows of the second embedding, if the model has one. */
    private readonly rows: TokenRows | undefined,
    /** The GPU that computes, if one does. */
    private readonly program: Program | undefined,
  ) {}

  /** `startWorker`: starts a worker for a thread, which receives its Thread on the port. `tableBytes`: memory for rows of a second embedding. */
  static async load(files: Files, options: LoadOptions, isolated: boolean, from: DownloadOptions, startWorker: (port: MessagePort) => void, tableBytes?: number): Promise<Host> {
    let reader: ModelFiles | undefined;
    let rows: TokenRows | undefined;
    try {
      const planOn = async (core: Core) => makePlan(core, (reader ??= await open(files, from, false)), options, false, from.where, tableBytes);
      const onCpu = async () => {
        const { core, build } = await startCore(isolated, "Engine.load", options);
        return { core, build, plan: await planOn(core), program: undefined };
      };
      const startGpu = async (gpu: WebAssembly.ModuleImports) => (await startCore(isolated, "Engine.load", { gpu })).core;
      const gpu = options.device === "gpu" ? await (await loadGpu()).planOnGpu(startGpu, planOn) : undefined;
      const { core, build, plan: whole, program } = typeof gpu === "object" ? gpu : await onCpu();
      const { slices, ...plan } = whole;
      const { config, table, kvBytes } = plan;
      checkMemory(core, plan, program === undefined);
      const n = build === "plain" || build === "gpu" ? 1 : (options.threads ?? Math.max(1, Math.floor(nProcessors() / 2)));
      await Promise.all(Array.from({ length: n - 1 }, () => startThread(core, startWorker)));
      core.call("set_threads", n);
      await packWeights(core, whole, reader!, from, program?.uploads(config));
      const held = table && new TokenRows(core, table, reader!);
      engineCalls.begin_engine(core, { kvBytes, maxBatch: plan.maxRows - PREFILL_CHUNK, chunk: PREFILL_CHUNK, bf16Cache: plan.bf16Cache });
      const info = {
        ...describePlan(plan),
        vocabSize: config.vocabSize,
        threads: n,
        build,
        device: program === undefined ? ("cpu" as const) : ("gpu" as const),
        ...(program && { gpu: program.name }),
        ...(typeof gpu === "string" && { fallback: gpu }),
        exact: program === undefined && core.call("is_fused") === 1,
        hasChatTemplate: plan.hasChatTemplate,
        weightsBytes: core.call("weights_bytes") >>> 0,
        kvBytes: core.call("kv_bytes") >>> 0,
      };
      rows = held;
      return new Host(core, plan, info, reader!.name, options.weights, rows, program);
    } finally {
      if (rows === undefined) await reader?.close?.(); // else rows are read from it
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
    const id = await this.betweenSteps(() =>
      this.core.with([prompt, stops, stopText, numbers], (tokens, stopTokens, text, settings) =>
        this.add(where, engineCalls.add_prompt, { tokens, nTokens: prompt.length, stops: stopTokens, nStops: stops.length, stopText: text, numbers: settings, nNumbers: numbers.length }),
      ),
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
        await this.step(id, { where, signal });
        await yieldToEventLoop();
      }
      this.core.call("job_error", id);
      const error = this.core.result();
      if (error !== "") throw new WhetError(`${where}: ${error}`);
    } finally {
      await this.betweenSteps(() => this.core.call("remove", id));
    }
  }

  /** Run a step of all requests. With a second embedding, the rows of its tokens are read before. Steps that wait for rows or for a
   * GPU follow one another. */
  private step(id: number, by: Caller): unknown {
    const { core, rows, program } = this;
    if (rows === undefined && program === undefined) return core.call("step");
    const isDone = () => core.call("is_done", id) === 1; // by the step of another request
    return this.inTurn(async () => {
      while (!isDone() && (await rows?.read(this.tokensAt(core.call("plan_step")), by)));
      if (!isDone()) await (program === undefined ? core.call("step") : program.step());
    });
  }

  /** Run what changes the next step: not within one that waits for a GPU. */
  private betweenSteps<T>(run: () => T | Promise<T>): T | Promise<T> {
    return this.program === undefined ? run() : this.inTurn(async () => run());
  }

  /** Run after all earlier ones. */
  private inTurn<T>(run: () => Promise<T>): Promise<T> {
    const turn = this.lastTurn.then(run);
    this.lastTurn = turn.catch(() => {}); // the error is the caller's
    return turn;
  }

  /** Return tokens in the core's memory, after their number. */
  private tokensAt(at: number): Int32Array {
    return this.core.integers(at + 4, this.core.integers(at, 1)[0]);
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
    const id = await this.betweenSteps(() => this.core.with([tokens], (at) => this.add(where, engineCalls.add_score, { tokens: at, n: tokens.length, scoreFrom: start, temperature, adapterId: adapter })));
    let found = new Float32Array();
    await this.runRequest(id, where, signal, () => (found = this.core.floats(this.core.call("scores", id), tokens.length - start)));
    return found;
  }

  async loadAdapter(files: Files, from: DownloadOptions): Promise<number> {
    const factors = await this.readAdapter(files, from);
    const { program } = this;
    return program === undefined ? this.addAdapter(factors) : this.inTurn(() => this.addToGpu(program, factors));
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
    this.beginAdapter(factors);
    return this.endAdapter();
  }

  private async addToGpu(program: Program, factors: LoraFactors[]): Promise<number> {
    this.beginAdapter(factors);
    await program.addAdapter(this.nextAdapter);
    return this.endAdapter();
  }

  private beginAdapter(factors: LoraFactors[]): void {
    this.core.call("begin_adapter");
    for (const { layer, target, firstRow, rank, a, b, scaling } of factors) {
      const factor = Math.fround(scaling);
      const scaled = b.map((x) => factor * x); // float32 times float32, rounded once as in Python
      this.core.with([a, scaled], (down, up) =>
        engineCalls.add_adapter_part(this.core, { layer, target: enums.target.indexOf(target), firstRow, a: down, b: up, rank, k: a.length / rank, n: b.length / rank }),
      );
    }
  }

  private endAdapter(): number {
    this.core.call("end_adapter", this.nextAdapter);
    this.adapters.add(this.nextAdapter);
    return this.nextAdapter++;
  }

  removeAdapter(adapter: number): void | Promise<void> {
    this.checkAdapter(adapter, "Engine.removeAdapter");
    return this.betweenSteps(() => {
      this.core.call("remove_adapter", adapter);
      this.adapters.delete(adapter);
    });
  }

  /** Run an action of the learner. */
  async learn(request: LearnRequest, from: DownloadOptions): Promise<unknown> {
    const { action, given, where } = request;
    if (action === "create") return this.createLearner(given, from);
    if (action === "encode") return given.map((example, i) => this.encodeExample(example, `${where}: rows[${i}]`));
    const { rows } = this;
    const run = async () => {
      if (this.learner === undefined) throw new WhetError(`${where}: the learner is closed. Create another: engine.learner().`);
      if (action === "logprobs") await rows?.read(given.rows.flatMap(({ prompt, completion }) => [...prompt, ...completion]), from);
      if (action === "save") await rows?.read(this.tokensAt(this.core.call("checked_rows")), from);
      const found = await this.learner.run(request);
      if (action === "close") this.learner = undefined;
      return found;
    };
    return rows === undefined ? run() : this.inTurn(run);
  }

  private async createLearner({ files, ...settings }: AdapterSettings, from: DownloadOptions): Promise<LearnerInfo> {
    const { core, plan } = this;
    const { where } = from;
    if (this.staticInfo.build !== "learner") throw new WhetError(`${where}: the engine was loaded without the learner. Pass learning: true to Engine.load.`);
    const { LearnerHost } = await loadLearner();
    const modules = (await loadHf()).locateModules(plan.config, plan.family);
    const saved = files === undefined ? undefined : await this.readAdapter(files, from);
    if (this.learner !== undefined) throw new WhetError(`${where}: the engine has a learner already. Close it first: learner.close().`);
    this.learner = new LearnerHost({ core, ...plan, modules, name: this.name, weights: this.weights, addAdapter: (factors) => this.addAdapter(factors), removeAdapter: (adapter) => { if (this.adapters.has(adapter)) void this.removeAdapter(adapter); } }, settings, saved, where);
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

async function startThread(core: Core, startWorker: (port: MessagePort) => void): Promise<void> {
  const { port1, port2 } = new MessageChannel();
  startWorker(port2);
  port1.postMessage(core.newThread());
  await new Promise((resolve) => (port1.onmessage = resolve));
  port1.close();
}
