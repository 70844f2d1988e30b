/** Whet's engine in the browser, Node, Deno and Bun: language models from GGUF files, on the core's WebAssembly build. */
import { OutOfMemoryError, WhetError } from "./errors.js";
import { isNode, startEngineWorker, type WorkerPort } from "./port.js";
import type { AdapterPart, Answer, Call, Info, LoadOptions, Sampling, Token } from "./protocol.js";
import type { Progress, Source } from "./reader.js";

export { OutOfMemoryError, WhetError } from "./errors.js";
export type { AdapterPart, Info, LoadOptions, Progress, Sampling, Source, Token };

interface Waiting {
  event(event: unknown): void;
  resolve(result: unknown): void;
  reject(error: Error): void;
}

let hasWarned = false;

/** Whether threads can share memory here. */
function isIsolated(): boolean {
  const isolated = isNode || globalThis.crossOriginIsolated !== false;
  if (!isolated && !hasWarned) {
    hasWarned = true;
    console.warn(
      "whet-web: this page is not cross-origin isolated, so that the engine has one thread. Serve it with " +
        "Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy: require-corp.",
    );
  }
  return isolated;
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
   * Loads a GGUF file.
   *
   * @param source a URL (in Node also a file: URL), a File or Blob, or the file's bytes.
   * @throws WhetError a file that the engine does not run, or that is damaged. OutOfMemoryError.
   */
  static async load(source: Source, options: LoadOptions & { signal?: AbortSignal; onProgress?: Progress } = {}): Promise<Engine> {
    const { signal, onProgress, ...rest } = options;
    const engine = new Engine(await startEngineWorker());
    const plain = source instanceof URL ? source.href : source;
    try {
      await engine.call({ method: "load", source: plain, options: rest, isolated: isIsolated() }, signal, (event) =>
        onProgress?.(event as Parameters<Progress>[0]),
      );
    } catch (error) {
      engine.close();
      throw error;
    }
    return engine;
  }

  /**
   * Samples tokens after a prompt of token ids. The same seed gives the same tokens as in native Whet where info().exact.
   *
   * @returns the tokens as they are drawn; leaving the loop ends the request.
   */
  async *generate(prompt: ArrayLike<number>, options: Sampling & { signal?: AbortSignal } = {}): AsyncGenerator<Token, void> {
    const { signal, ...sampling } = options;
    checkTokens("generate", "prompt", prompt);
    const left = new AbortController();
    const tokens: Token[] = [];
    let wake = () => {};
    let state: { isOver: boolean; error?: Error } = { isOver: false };
    const both = signal === undefined ? left.signal : AbortSignal.any([signal, left.signal]);
    this.call({ method: "generate", prompt: Int32Array.from(prompt), sampling }, both, (event) => {
      tokens.push(...(event as Token[]));
      wake();
    }).then(
      () => ((state = { isOver: true }), wake()),
      (error: Error) => ((state = { isOver: true, error }), wake()),
    );
    try {
      for (;;) {
        while (tokens.length > 0) yield tokens.shift()!;
        if (state.error !== undefined) throw state.error;
        if (state.isOver) return;
        await new Promise<void>((resolve) => (wake = resolve));
      }
    } finally {
      left.abort();
    }
  }

  /** Log-probs of tokens[scoreFrom ...] after those before them. */
  async logprobs(
    tokens: ArrayLike<number>,
    { scoreFrom = 1, temperature = 1, adapter = 0, signal }: { scoreFrom?: number; temperature?: number; adapter?: number; signal?: AbortSignal } = {},
  ): Promise<Float32Array> {
    checkTokens("logprobs", "tokens", tokens);
    return (await this.call({ method: "logprobs", tokens: Int32Array.from(tokens), scoreFrom, temperature, adapter }, signal)) as Float32Array;
  }

  /** An adapter that requests may name. Returns its number. */
  async loadAdapter(parts: AdapterPart[]): Promise<number> {
    return (await this.call({ method: "loadAdapter", parts })) as number;
  }

  async removeAdapter(adapter: number): Promise<void> {
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
    const aborted = () => this.worker.postMessage({ id, abort: true });
    signal?.addEventListener("abort", aborted, { once: true });
    const result = new Promise((resolve, reject) => {
      this.waiting.set(id, { event, resolve, reject });
      this.worker.postMessage({ id, call });
    });
    return result.finally(() => signal?.removeEventListener("abort", aborted));
  }
}

function checkTokens(method: string, name: string, tokens: ArrayLike<number>): void {
  if (typeof tokens === "string" || !(tokens?.length > 0)) {
    throw new WhetError(`Engine.${method}: ${name} is ${JSON.stringify(tokens)?.slice(0, 80)}, expected at least one token id.`);
  }
}

function toError({ name, message }: { name: string; message: string }): Error {
  if (name === "AbortError") return new DOMException(message, name);
  if (name === "OutOfMemoryError") return new OutOfMemoryError(message);
  return new WhetError(message);
}
