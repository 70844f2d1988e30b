/** The Engine of a page: arguments are checked here, and its worker does the rest. */
import { Chat } from "./chat.js";
import { OutOfMemoryError, WhetError } from "./errors.js";
import { startEngineWorker, type WorkerPort } from "./port.js";
import type { Answer, Call, Estimate, FileOptions, Info, LoadOptions, Measure, Prompt, PromptOptions, Request, Token } from "./protocol.js";
import { checkSampling, isTemperature, type Sampling, show } from "./sampling.js";
import { checkDigests, listFiles, type Progress, type Sources } from "./sources.js";
import type { Message } from "./tokenizer.js";

interface Waiting {
  event(event: unknown): void;
  resolve(result: unknown): void;
  reject(error: Error): void;
}

interface Signal {
  /** Ends the call, which then rejects with the signal's reason. */
  signal?: AbortSignal;
}

interface Assets {
  /** Where worker.js, thread.js, hf.js and the wasm files of the package are served; beside this script where it is left out. */
  assets?: string | URL;
}

export interface GenerateOptions extends Sampling, PromptOptions, Signal {
  /** Samples of the prompt; 1 where it is left out. */
  n?: number;
  /** What loadAdapter returned; the model itself where it is left out. */
  adapter?: number;
  /** With the seed and the sample's number the key of its random numbers; 0 where it is left out. */
  promptIndex?: number;
}

let hasWarned = false;

/** Why an engine has one thread where more were wanted; once. */
function warnOfOneThread(isolated: boolean): void {
  if (hasWarned) return;
  hasWarned = true;
  console.warn(
    isolated
      ? "whet-web: the engine has one thread: this runtime has no shared memory, or not enough addresses for it."
      : "whet-web: this page is not cross-origin isolated, so that the engine has one thread. Serve it with the headers " +
          "Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy: require-corp.",
  );
}

const isCount = (value: unknown, most = Infinity) => Number.isSafeInteger(value) && (value as number) >= 1 && (value as number) <= most;

/** The largest counts that are taken: the core counts bytes in 32 bits, with a workspace for each of maxBatch; a sample costs memory of the worker, and a thread milliseconds to start. */
const MOST = { threads: 128, contextLength: 2 ** 31 - 1, kvBytes: 2 ** 32 - 1, maxBatch: 2 ** 12, n: 2 ** 16, start: 2 ** 31 - 1 };

function checkCounts(where: string, options: { [name in keyof typeof MOST]?: unknown }): void {
  for (const [name, value] of Object.entries(options)) {
    const most = MOST[name as keyof typeof MOST];
    if (value !== undefined && !isCount(value, most)) throw new WhetError(`${where}: ${name} is ${show(value)}, expected an integer from 1 to ${most}.`);
  }
}

function checkNames(where: string, options: unknown, names: readonly string[]): void {
  if (typeof options !== "object" || options === null) throw new WhetError(`${where}: options is ${show(options)}, expected an object.`);
  const unknown = Object.keys(options).find((name) => !names.includes(name));
  if (unknown !== undefined) throw new WhetError(`${where}: there is no option ${unknown}. There are: ${names.join(", ")}.`);
}

function checkSignal(where: string, signal: unknown): void {
  if (signal !== undefined && !(signal instanceof AbortSignal)) throw new WhetError(`${where}: signal is ${show(signal)}, expected an AbortSignal.`);
}

/** A model in a worker of its own. */
export class Engine {
  private readonly waiting = new Map<number, Waiting>();
  private nextId = 1;
  private closed: Error | undefined;

  private constructor(private readonly worker: WorkerPort) {
    worker.onMessage((answer: Answer) => {
      const waiting = this.waiting.get(answer.id);
      if (waiting === undefined) return;
      if ("event" in answer) return waiting.event(answer.event);
      this.waiting.delete(answer.id);
      if ("result" in answer) return waiting.resolve(answer.result);
      waiting.reject(toError(answer.error));
    });
    worker.onError((error) => this.end(new WhetError(`Engine: its worker has failed: ${error.message}. Load the model again.`)));
  }

  /**
   * Loads a GGUF file or a Hugging Face folder.
   *
   * @param source a URL (in Node also a path), a File or Blob, the file's bytes, or the parts of a file that was split; of
   *   a folder its URL, which ends with a slash, or its files, of which one is config.json.
   * @throws WhetError a file that the engine does not run, or that is damaged. OutOfMemoryError.
   */
  static async load(source: Sources, options: LoadOptions & FileOptions & Signal & Assets & { onProgress?: (progress: Progress) => void } = {}): Promise<Engine> {
    const where = "Engine.load";
    checkNames(where, options, ["threads", "contextLength", "kvBytes", "maxBatch", "weights", "sha256", "cache", "signal", "onProgress", "assets"]);
    const { signal, onProgress, assets, ...rest } = options;
    const { threads, contextLength, kvBytes, maxBatch } = rest;
    checkCounts(where, { threads, contextLength, kvBytes, maxBatch });
    checkWeights(where, rest.weights);
    checkDigests(rest.sha256, where);
    checkSignal(where, signal);
    if (onProgress !== undefined && typeof onProgress !== "function") throw new WhetError(`${where}: onProgress is ${show(onProgress)}, expected a function.`);
    const files = listFiles(source, where);
    const engine = new Engine(await startEngineWorker(assets));
    try {
      const isolated = globalThis.crossOriginIsolated !== false; // undefined outside of browsers, where memory is shared
      const loading = engine.call({ method: "load", files, options: rest, isolated }, signal, (event) => onProgress?.(event as Progress));
      const { build } = (await loading) as Info;
      if (build === "plain" && threads !== 1) warnOfOneThread(isolated);
    } catch (error) {
      engine.close();
      throw error;
    }
    return engine;
  }

  /** What a model needs, from the head of its file: of a URL nothing more is downloaded. */
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
   * Samples after a prompt. Where info().exact, the same seed gives the tokens and the bits of native Whet.
   *
   * @param prompt a text; messages, for the model's chat template; or token ids. A text and messages end with the model's own
   *   stop tokens too, token ids with `stopTokenIds` alone.
   * @returns the tokens as they are drawn; leaving the loop ends the request.
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
      stopsByItself: !(checked instanceof Int32Array),
      n,
      promptIndex,
      adapter,
    };
    return this.stream(request, signal);
  }

  private async *stream(request: Request, signal: AbortSignal | undefined): AsyncGenerator<Token, void> {
    const left = new AbortController();
    const tokens: Token[] = [];
    let wake = () => {};
    let state: { isOver: boolean; error?: Error } = { isOver: false };
    const both = signal === undefined ? left.signal : AbortSignal.any([signal, left.signal]);
    this.call({ method: "generate", request }, both, (event) => {
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
          if (signal?.aborted) throw signal.reason; // what has come meanwhile is not wanted
        }
        if (state.error !== undefined) throw state.error;
        if (state.isOver) return;
        await new Promise<void>((resolve) => (wake = resolve));
      }
    } finally {
      left.abort();
    }
  }

  /** A conversation, whose messages it keeps. `options`: as of generate; `system`: what the conversation begins with. */
  chat(options: Omit<GenerateOptions, "n" | "signal"> & { system?: string } = {}): Chat {
    return new Chat(this, options);
  }

  /** @internal Tokens of messages, and of the longest sequence that there is memory for. */
  async measure(messages: Message[], options: PromptOptions): Promise<Measure> {
    return (await this.call({ method: "measure", messages, options })) as Measure;
  }

  /** Log-probs of a text's or ids' tokens from `start` on, after those before them. */
  async logprobs(tokens: string | ArrayLike<number>, options: { start?: number; temperature?: number; adapter?: number } & Signal = {}): Promise<Float32Array> {
    const where = "Engine.logprobs";
    checkNames(where, options, ["start", "temperature", "adapter", "signal"]);
    const { start = 1, temperature = 1, adapter = 0, signal } = options;
    checkCounts(where, { start });
    checkAdapter(where, adapter);
    checkSignal(where, signal);
    if (!isTemperature(temperature)) throw new WhetError(`${where}: temperature is ${show(temperature)}, expected a finite number > 0, from 1e-30 to 1e30.`);
    const prompt = typeof tokens === "string" ? tokens : checkIds(where, "tokens", tokens);
    return (await this.call({ method: "logprobs", prompt, start, temperature, adapter }, signal)) as Float32Array;
  }

  /** The ids of a text, with BOS and EOS as the model says. */
  async tokenize(text: string, { addSpecialTokens = true }: { addSpecialTokens?: boolean } = {}): Promise<number[]> {
    if (typeof text !== "string") throw new WhetError(`Engine.tokenize: text is ${show(text)}, expected a string.`);
    return (await this.call({ method: "tokenize", text, addSpecialTokens })) as number[];
  }

  /** The text of ids, without special tokens. */
  async detokenize(tokens: ArrayLike<number>): Promise<string> {
    return (await this.call({ method: "detokenize", tokens: checkIds("Engine.detokenize", "tokens", tokens) })) as string;
  }

  /** Messages as the text that the model's chat template makes of them. */
  async render(messages: readonly Message[], options: PromptOptions = {}): Promise<string> {
    checkNames("Engine.render", options, ["tools", "addGenerationPrompt", "templateOptions"]);
    return (await this.call({ method: "render", messages: checkMessages("Engine.render", messages), options })) as string;
  }

  /**
   * A LoRA adapter that requests may name, beside others.
   *
   * @param source the two files that PEFT saves, adapter_config.json and adapter_model.safetensors: their folder's URL,
   *   which ends with a slash, or their URLs, Files, or {files: {name: file}}.
   * @returns its number.
   */
  async loadAdapter(source: Sources, options: FileOptions & Signal = {}): Promise<number> {
    const where = "Engine.loadAdapter";
    checkNames(where, options, ["sha256", "cache", "signal"]);
    const { signal, ...rest } = options;
    checkDigests(rest.sha256, where);
    checkSignal(where, signal);
    return (await this.call({ method: "loadAdapter", files: listFiles(source, where), options: rest }, signal)) as number;
  }

  /** Forgets an adapter. Requests that have begun with it go on with it. */
  async removeAdapter(adapter: number): Promise<void> {
    checkAdapter("Engine.removeAdapter", adapter);
    await this.call({ method: "removeAdapter", adapter });
  }

  async info(): Promise<Info> {
    return (await this.call({ method: "info" })) as Info;
  }

  /** Ends the worker, its threads and its memory; what still runs fails. */
  close(): void {
    this.end(new WhetError("Engine: it is closed. Load the model again."));
  }

  private end(error: Error): void {
    if (this.closed !== undefined) return;
    this.closed = error;
    this.worker.terminate();
    for (const waiting of this.waiting.values()) waiting.reject(error);
    this.waiting.clear();
  }

  private call(call: Call, signal?: AbortSignal, event: (event: unknown) => void = () => {}): Promise<unknown> {
    if (this.closed !== undefined) return Promise.reject(this.closed);
    if (signal?.aborted) return Promise.reject(signal.reason);
    const id = this.nextId++;
    return new Promise((resolve, reject) => {
      const aborted = () => {
        if (!this.waiting.delete(id)) return;
        this.worker.postMessage({ id, abort: true });
        reject(signal!.reason);
      };
      const settle = () => signal?.removeEventListener("abort", aborted);
      this.waiting.set(id, { event, resolve: (result) => (settle(), resolve(result)), reject: (error) => (settle(), reject(error)) });
      signal?.addEventListener("abort", aborted, { once: true });
      try {
        this.worker.postMessage({ id, call });
      } catch (error) {
        this.waiting.delete(id);
        settle();
        reject(new WhetError(`Engine.${call.method}: an argument cannot be sent to the engine's worker (${(error as Error).message}). Pass plain data.`));
      }
    });
  }
}

function checkWeights(where: string, weights: unknown): void {
  if (weights !== undefined && typeof weights !== "string") throw new WhetError(`${where}: weights is ${show(weights)}, expected the name of a format, such as "q8_0".`);
}

function checkAdapter(where: string, adapter: unknown): void {
  if (adapter !== 0 && !isCount(adapter)) throw new WhetError(`${where}: adapter is ${show(adapter)}, expected what loadAdapter returned.`);
}

function checkPrompt(where: string, prompt: unknown): string | Message[] | Int32Array {
  if (typeof prompt === "string") return prompt;
  const isMessages = Array.isArray(prompt) && typeof prompt[0] === "object";
  return isMessages ? checkMessages(where, prompt) : checkIds(where, "prompt", prompt);
}

function checkMessages(where: string, messages: unknown): Message[] {
  const wrong = (found: unknown) => new WhetError(`${where}: messages has ${show(found)}, expected objects with a role and a content, at least one.`);
  if (!Array.isArray(messages) || messages.length === 0) throw wrong(messages);
  for (const message of messages) if (typeof message?.role !== "string" || (message.content === undefined && message.tool_calls === undefined)) throw wrong(message);
  return messages;
}

function checkIds(where: string, name: string, ids: unknown): Int32Array {
  const items = typeof ids === "object" && ids !== null && "length" in ids ? Array.from(ids as ArrayLike<unknown>) : [];
  const bad = items.find((id) => !Number.isInteger(id) || (id as number) < 0 || (id as number) > 0x7fffffff);
  if (items.length === 0 || bad !== undefined) throw new WhetError(`${where}: ${name} ${bad === undefined ? "is" : "has"} ${show(bad ?? ids)}, expected a text, messages or token ids, at least one.`);
  return Int32Array.from(items as number[]);
}

function toError({ name, message }: { name: string; message: string }): Error {
  if (name === "AbortError") return new DOMException(message, name);
  if (name === "OutOfMemoryError") return new OutOfMemoryError(message);
  return new WhetError(message);
}
