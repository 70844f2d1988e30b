/** Engine in a page: checks arguments and sends calls to its worker. */
import { OutOfMemoryError, show, WhetError } from "../core/errors.js";
import { startEngineWorker, startThreadWorker, type WorkerPort } from "../core/port.js";
import { ISOLATION } from "../core/start.js";
import type { FileOptions, Progress } from "../files/reader.js";
import { checkDigests, listFiles, type Sources } from "../files/sources.js";
import { Learner } from "../learner/learner.js";
import { checkLearnerOptions, type LearnerOptions } from "../learner/options.js";
import type { Action, Actions, LearnRequest } from "../learner/protocol.js";
import type { GenerateOptions, Prompt, Signal, Token } from "../settings/requests.js";
import { checkSampling, isTemperature } from "../settings/sampling.js";
import type { Message, PromptOptions } from "../text/tokenizer.js";
import { Chat } from "./chat.js";
import type { Call, Estimate, Info, LoadOptions, Measure, Reply, Request } from "./protocol.js";

interface PendingCall {
  event(event: unknown): void;
  resolve(result: unknown): void;
  reject(error: Error): void;
}

interface Assets {
  /** URL of the folder that serves the package's worker.js, thread.js, hf.js, learner.js, gpu.js and wasm files. Default: this script's folder. */
  assets?: string | URL;
}

const warned = new Set<string>();

/** Warn once, of all engines. */
function warn(text: string): void {
  if (!warned.has(text)) console.warn(`whet-web: the engine ${text}.`);
  warned.add(text);
}

const isCount = (value: unknown, most = Infinity) => Number.isSafeInteger(value) && (value as number) >= 1 && (value as number) <= most;

/** Upper bounds: the core addresses 32 bits and allocates a workspace per maxBatch row; a sample takes memory of the worker, and a thread takes milliseconds to start. */
const LIMITS = { threads: 128, contextLength: 2 ** 31 - 1, kvBytes: 2 ** 32 - 1, maxBatch: 2 ** 12, n: 2 ** 16, start: 2 ** 31 - 1 };

function checkCounts(where: string, options: { [name in keyof typeof LIMITS]?: unknown }): void {
  for (const [name, value] of Object.entries(options)) {
    const limit = LIMITS[name as keyof typeof LIMITS];
    if (value !== undefined && !isCount(value, limit)) throw new WhetError(`${where}: ${name} is ${show(value)}, expected an integer from 1 to ${limit}.`);
  }
}

function checkNames(where: string, options: unknown, names: readonly string[]): void {
  if (typeof options !== "object" || options === null) throw new WhetError(`${where}: options is ${show(options)}, expected an object.`);
  const unknown = Object.keys(options).find((name) => !names.includes(name));
  if (unknown !== undefined) throw new WhetError(`${where}: unknown option ${unknown}. Options: ${names.join(", ")}.`);
}

function checkSignal(where: string, signal: unknown): void {
  if (signal !== undefined && !(signal instanceof AbortSignal)) throw new WhetError(`${where}: signal is ${show(signal)}, expected an AbortSignal.`);
}

/** A model in its own worker. */
export class Engine {
  private readonly pending = new Map<number, PendingCall>();
  private readonly threads: WorkerPort[] = [];
  private nextId = 1;
  private closed: Error | undefined;

  private constructor(private readonly worker: WorkerPort) {
    worker.onMessage((reply: Reply) => {
      const call = this.pending.get(reply.id);
      if (call === undefined) return;
      if ("event" in reply) return call.event(reply.event);
      this.pending.delete(reply.id);
      if ("result" in reply) return call.resolve(reply.result);
      call.reject(toError(reply.error));
    });
    worker.onError((error) => this.fail(error));
  }

  /**
   * Load a GGUF file or a Hugging Face folder.
   *
   * @param source a URL (in Node also a path), a File or Blob, the file's bytes, or the parts of a split file; for a folder,
   *   its URL with a trailing slash, or its files, including config.json.
   * @throws WhetError the model is not supported or a file is damaged. OutOfMemoryError.
   */
  static async load(source: Sources, options: LoadOptions & FileOptions & Signal & Assets & { onProgress?: (progress: Progress) => void } = {}): Promise<Engine> {
    const where = "Engine.load";
    checkNames(where, options, ["threads", "contextLength", "kvBytes", "maxBatch", "weights", "device", "learning", "sha256", "cache", "signal", "onProgress", "assets"]);
    const { signal, onProgress, assets, ...rest } = options;
    const { threads, contextLength, kvBytes, maxBatch } = rest;
    checkCounts(where, { threads, contextLength, kvBytes, maxBatch });
    checkWeights(where, rest.weights);
    if (rest.learning !== undefined && typeof rest.learning !== "boolean") throw new WhetError(`${where}: learning is ${show(rest.learning)}, expected true or false.`);
    checkDevice(where, rest);
    checkDigests(rest.sha256, where);
    checkSignal(where, signal);
    if (onProgress !== undefined && typeof onProgress !== "function") throw new WhetError(`${where}: onProgress is ${show(onProgress)}, expected a function.`);
    const files = listFiles(source, where);
    const engine = new Engine(await startEngineWorker(assets));
    try {
      const isolated = globalThis.crossOriginIsolated !== false; // undefined outside browsers, where memory can be shared
      const loading = engine.call({ method: "load", files, options: rest, isolated }, signal, (event) => {
        const either = event as Progress | { port: MessagePort };
        if ("port" in either) engine.startThread(either.port, assets);
        else onProgress?.(either);
      });
      const { build, fallback } = (await loading) as Info;
      if (fallback !== undefined) warn(`computes on the CPU: ${fallback}`);
      if (build === "plain" && threads !== 1) warn(`has one thread: ${isolated ? "this runtime lacks shared memory or address space for it" : `this page is not cross-origin isolated. Serve it with the headers ${ISOLATION}`}`);
    } catch (error) {
      engine.close();
      throw error;
    }
    return engine;
  }

  /** Return a model's size and memory from its file headers; of a URL, only those ranges are downloaded. */
  static async estimate(source: Sources, options: Pick<LoadOptions, "contextLength" | "weights"> & Signal & Assets = {}): Promise<Estimate> {
    const where = "Engine.estimate";
    checkNames(where, options, ["contextLength", "weights", "signal", "assets"]);
    const { contextLength, weights } = options;
    checkCounts(where, { contextLength });
    checkWeights(where, weights);
    checkSignal(where, options.signal);
    const files = listFiles(source, where);
    const engine = new Engine(await startEngineWorker(options.assets));
    try {
      return (await engine.call({ method: "estimate", files, options: { contextLength, weights } }, options.signal)) as Estimate;
    } finally {
      engine.close();
    }
  }

  /**
   * Sample completions of a prompt. If info().exact, tokens and log-probs are bit-identical to native Whet's for the same seed.
   *
   * @param prompt a text, messages for the model's chat template, or token ids. Completions of texts and messages also end with
   *   the model's stop tokens, completions of token ids only with `stopTokenIds`.
   * @returns a stream of tokens; leaving the loop ends the request.
   */
  generate(prompt: Prompt, options: GenerateOptions = {}): AsyncGenerator<Token, void> {
    const where = "Engine.generate";
    if (typeof options !== "object" || options === null) throw new WhetError(`${where}: options is ${show(options)}, expected an object.`);
    const { signal, n = 1, adapter = 0, promptIndex = 0, tools, addGenerationPrompt, templateOptions, ...sampling } = options;
    checkCounts(where, { n });
    checkAdapter(where, adapter);
    checkSignal(where, signal);
    if (!Number.isSafeInteger(promptIndex) || promptIndex < 0) throw new WhetError(`${where}: promptIndex is ${show(promptIndex)}, expected an integer >= 0.`);
    const checked = checkPrompt(where, prompt);
    const request: Request = {
      prompt: checked,
      options: { tools, addGenerationPrompt, templateOptions },
      sampling: checkSampling(sampling, where),
      usesModelStops: !(checked instanceof Int32Array),
      n,
      promptIndex,
      adapter,
    };
    return this.stream(request, signal);
  }

  private async *stream(request: Request, signal: AbortSignal | undefined): AsyncGenerator<Token, void> {
    const exit = new AbortController();
    const tokens: Token[] = [];
    let wake = () => {};
    let state: { isOver: boolean; error?: Error } = { isOver: false };
    const either = signal === undefined ? exit.signal : AbortSignal.any([signal, exit.signal]);
    this.call({ method: "generate", request }, either, (event) => {
      tokens.push(...(event as Token[]));
      wake();
    }).then(
      () => ((state = { isOver: true }), wake()),
      (error: Error) => ((state = { isOver: true, error }), wake()),
    );
    try {
      for (;;) {
        if (signal?.aborted) throw signal.reason;
        while (tokens.length > 0) {
          yield tokens.shift()!;
          if (signal?.aborted) throw signal.reason; // discards buffered tokens
        }
        if (state.error !== undefined) throw state.error;
        if (state.isOver) return;
        await new Promise<void>((resolve) => (wake = resolve));
      }
    } finally {
      exit.abort();
    }
  }

  /** Start a conversation. `options`: as for generate; `system`: the system message. */
  chat(options: Omit<GenerateOptions, "n" | "signal"> & { system?: string } = {}): Chat {
    return new Chat(this, options);
  }

  /** @internal Count the tokens of messages and of the longest sequence that fits in the KV cache. */
  async measure(messages: Message[], options: PromptOptions): Promise<Measure> {
    return (await this.call({ method: "measure", messages, options })) as Measure;
  }

  /** Return the log-probs of tokens[start:], each given the tokens before it. */
  async logprobs(tokens: string | ArrayLike<number>, options: { start?: number; temperature?: number; adapter?: number } & Signal = {}): Promise<Float32Array> {
    const where = "Engine.logprobs";
    checkNames(where, options, ["start", "temperature", "adapter", "signal"]);
    const { start = 1, temperature = 1, adapter = 0, signal } = options;
    checkCounts(where, { start });
    checkAdapter(where, adapter);
    checkSignal(where, signal);
    if (!isTemperature(temperature)) throw new WhetError(`${where}: temperature is ${show(temperature)}, expected a number from 1e-30 to 1e30.`);
    const prompt = typeof tokens === "string" ? tokens : checkIds(where, "tokens", tokens);
    return (await this.call({ method: "logprobs", prompt, start, temperature, adapter }, signal)) as Float32Array;
  }

  /** Return the token ids of a text, with BOS and EOS as the model specifies. */
  async tokenize(text: string, { addSpecialTokens = true }: { addSpecialTokens?: boolean } = {}): Promise<number[]> {
    if (typeof text !== "string") throw new WhetError(`Engine.tokenize: text is ${show(text)}, expected a string.`);
    return (await this.call({ method: "tokenize", text, addSpecialTokens })) as number[];
  }

  /** Return the text of token ids, without special tokens. */
  async detokenize(tokens: ArrayLike<number>): Promise<string> {
    return (await this.call({ method: "detokenize", tokens: checkIds("Engine.detokenize", "tokens", tokens) })) as string;
  }

  /** Render messages with the model's chat template. */
  async render(messages: readonly Message[], options: PromptOptions = {}): Promise<string> {
    checkNames("Engine.render", options, ["tools", "addGenerationPrompt", "templateOptions"]);
    return (await this.call({ method: "render", messages: checkMessages("Engine.render", messages), options })) as string;
  }

  /**
   * Load a LoRA adapter, which requests select by its number.
   *
   * @param source the two files that PEFT saves, adapter_config.json and adapter_model.safetensors: their folder's URL with a
   *   trailing slash, or their URLs, Files, or {files: {name: file}}.
   * @returns the adapter's number.
   */
  async loadAdapter(source: Sources, options: FileOptions & Signal = {}): Promise<number> {
    const where = "Engine.loadAdapter";
    checkNames(where, options, ["sha256", "cache", "signal"]);
    const { signal, ...rest } = options;
    checkDigests(rest.sha256, where);
    checkSignal(where, signal);
    return (await this.call({ method: "loadAdapter", files: listFiles(source, where), options: rest }, signal)) as number;
  }

  /** Remove an adapter. Requests in progress keep it until they end. */
  async removeAdapter(adapter: number): Promise<void> {
    checkAdapter("Engine.removeAdapter", adapter);
    await this.call({ method: "removeAdapter", adapter });
  }

  /**
   * Create low-rank adapters to train on this model, which stays frozen. An engine has one learner at a time.
   *
   * @throws WhetError the engine was loaded without `learning: true`, or has a learner; an option does not fit the model.
   *   OutOfMemoryError.
   */
  async learner(options: LearnerOptions = {}): Promise<Learner> {
    const where = "Engine.learner";
    return new Learner(this, await this.learn("create", checkLearnerOptions(options, where), where));
  }

  /** @internal */
  async learn<A extends Action>(action: A, given: Actions[A][0], where: string, signal?: AbortSignal): Promise<Actions[A][1]> {
    return (await this.call({ method: "learn", request: { action, given, where } as LearnRequest }, signal)) as Actions[A][1];
  }

  /** @internal */
  readonly toPrompt = (prompt: Prompt, where: string) => checkPrompt(where, prompt);

  async info(): Promise<Info> {
    return (await this.call({ method: "info" })) as Info;
  }

  /** Terminate the worker and its threads, and free its memory. Calls in progress reject. */
  close(): void {
    this.end(new WhetError("Engine: the engine is closed. Load the model again."));
  }

  /** Start the worker of a thread, which receives its state from the engine's worker on the port. (Firefox may hang when a worker
   * starts another.) */
  private startThread(port: MessagePort, assets: string | URL | undefined): void {
    try {
      const thread = startThreadWorker(assets);
      this.threads.push(thread);
      thread.onError((error) => this.fail(error));
      thread.postMessage({ port }, [port]);
    } catch (error) {
      this.fail(error as Error);
    }
  }

  private fail(error: Error): void {
    this.end(new WhetError(`Engine: a worker failed: ${error.message}. Load the model again.`));
  }

  private end(error: Error): void {
    if (this.closed !== undefined) return;
    this.closed = error;
    for (const worker of [this.worker, ...this.threads]) worker.terminate();
    for (const call of this.pending.values()) call.reject(error);
    this.pending.clear();
  }

  private call(call: Call, signal?: AbortSignal, event: (event: unknown) => void = () => {}): Promise<unknown> {
    if (this.closed !== undefined) return Promise.reject(this.closed);
    if (signal?.aborted) return Promise.reject(signal.reason);
    const id = this.nextId++;
    return new Promise((resolve, reject) => {
      const aborted = () => {
        if (!this.pending.delete(id)) return;
        this.worker.postMessage({ id, abort: true });
        reject(signal!.reason);
      };
      const settle = () => signal?.removeEventListener("abort", aborted);
      this.pending.set(id, { event, resolve: (result) => (settle(), resolve(result)), reject: (error) => (settle(), reject(error)) });
      signal?.addEventListener("abort", aborted, { once: true });
      try {
        this.worker.postMessage({ id, call });
      } catch (error) {
        this.pending.delete(id);
        settle();
        reject(new WhetError(`Engine.${call.method}: an argument cannot be sent to the engine's worker (${(error as Error).message}). Pass plain data.`));
      }
    });
  }
}

function checkDevice(where: string, { device, learning, threads }: LoadOptions): void {
  if (device !== undefined && device !== "cpu" && device !== "gpu") throw new WhetError(`${where}: device is ${show(device)}, expected "cpu" or "gpu".`);
  if (device === "gpu" && learning) throw new WhetError(`${where}: device is "gpu", and learning computes on the CPU. Omit one of them.`);
  if (device === "gpu" && threads !== undefined) throw new WhetError(`${where}: device is "gpu", and threads are the CPU's. Omit one of them.`);
}

function checkWeights(where: string, weights: unknown): void {
  if (weights !== undefined && typeof weights !== "string") throw new WhetError(`${where}: weights is ${show(weights)}, expected the name of a format, such as "q8_0".`);
}

function checkAdapter(where: string, adapter: unknown): void {
  if (adapter !== 0 && !isCount(adapter)) throw new WhetError(`${where}: adapter is ${show(adapter)}, expected a number that loadAdapter returned.`);
}

function checkPrompt(where: string, prompt: unknown): string | Message[] | Int32Array {
  if (typeof prompt === "string") return prompt;
  const isMessages = Array.isArray(prompt) && typeof prompt[0] === "object";
  return isMessages ? checkMessages(where, prompt) : checkIds(where, "prompt", prompt);
}

function checkMessages(where: string, messages: unknown): Message[] {
  const invalid = (found: unknown) => new WhetError(`${where}: messages has ${show(found)}, expected at least one object with a role and a content.`);
  if (!Array.isArray(messages) || messages.length === 0) throw invalid(messages);
  for (const message of messages) if (typeof message?.role !== "string" || (message.content === undefined && message.tool_calls === undefined)) throw invalid(message);
  return messages;
}

function checkIds(where: string, name: string, ids: unknown): Int32Array {
  const items = typeof ids === "object" && ids !== null && "length" in ids ? Array.from(ids as ArrayLike<unknown>) : [];
  const bad = items.find((id) => !Number.isInteger(id) || (id as number) < 0 || (id as number) > 0x7fffffff);
  if (items.length === 0 || bad !== undefined) throw new WhetError(`${where}: ${name} ${bad === undefined ? "is" : "has"} ${show(bad ?? ids)}, expected a text, messages or at least one token id.`);
  return Int32Array.from(items as number[]);
}

function toError({ name, message }: { name: string; message: string }): Error {
  if (name === "AbortError") return new DOMException(message, name);
  if (name === "OutOfMemoryError") return new OutOfMemoryError(message);
  return new WhetError(message);
}
