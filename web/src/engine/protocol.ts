/** Messages between an Engine and its worker, and the public types of loading. */
import type { Build } from "../core/start.js";
import type { FileOptions, Progress } from "../files/reader.js";
import type { Files } from "../files/sources.js";
import type { LearnRequest } from "../learner/protocol.js";
import type { Token } from "../settings/requests.js";
import type { SamplingSettings } from "../settings/sampling.js";
import type { Message, PromptOptions } from "../text/tokenizer.js";

export interface LoadOptions {
  /** Number of threads. Default: half of the processors. */
  threads?: number;
  /** Longest sequence in tokens. Default: the model's, at most 4096. */
  contextLength?: number;
  /** Size of the KV cache. Default: one sequence of contextLength. */
  kvBytes?: number;
  /** Maximum number of samples in a batch. Default: 4. */
  maxBatch?: number;
  /** Format of all weights, such as "q8_0" or "float32". Default: quantised weights keep their format, floats become bf16. */
  weights?: string;
  /** "gpu": compute with WebGPU; where that is not possible, on the CPU, with a warning. Default: "cpu". */
  device?: "cpu" | "gpu";
  /** Load the build that learns, which needs threads: see Engine.learner. Default: false. */
  learning?: boolean;
}

export interface Request {
  prompt: string | Message[] | Int32Array;
  options: PromptOptions;
  sampling: SamplingSettings;
  /** Whether the model's stop tokens end a sample. */
  usesModelStops: boolean;
  n: number;
  promptIndex: number;
  adapter: number;
}

interface Sizes {
  architecture: string;
  parameters: number;
  contextLength: number;
  /** Distinct formats of the weights. */
  formats: string[];
  weightsBytes: number;
  kvBytes: number;
}

export interface Info extends Sizes {
  vocabSize: number;
  threads: number;
  build: Build;
  device: "cpu" | "gpu";
  /** The GPU that computes. */
  gpu?: string;
  /** Why the CPU computes although `device` was "gpu". */
  fallback?: string;
  /** Whether results are bit-identical to native Whet's: this runtime has a fused multiply-add. */
  exact: boolean;
  /** Whether prompts can be messages. */
  hasChatTemplate: boolean;
  /** Size of the WebAssembly memory. */
  memoryBytes: number;
}

export interface Estimate extends Sizes {
  /** Size of the download. */
  fileBytes: number;
}

/** Size of a prompt and of the context, in tokens. */
export interface Measure {
  tokens: number;
  context: number;
}

export type Call =
  | { method: "load"; files: Files; options: LoadOptions & FileOptions; isolated: boolean }
  | { method: "estimate"; files: Files; options: Pick<LoadOptions, "contextLength" | "weights"> }
  | { method: "generate"; request: Request }
  | { method: "measure"; messages: Message[]; options: PromptOptions }
  | { method: "logprobs"; prompt: string | Int32Array; start: number; temperature: number; adapter: number }
  | { method: "tokenize"; text: string; addSpecialTokens: boolean }
  | { method: "detokenize"; tokens: Int32Array }
  | { method: "render"; messages: Message[]; options: PromptOptions }
  | { method: "loadAdapter"; files: Files; options: FileOptions }
  | { method: "removeAdapter"; adapter: number }
  | { method: "learn"; request: LearnRequest }
  | { method: "info" };

export type WorkerMessage = { id: number; call: Call } | { id: number; abort: true };

export type Reply =
  | { id: number; event: Token[] | Progress | { port: MessagePort } }
  | { id: number; result: unknown }
  | { id: number; error: { name: string; message: string } };
