/** Messages between an Engine and its worker. */
import type { Settings } from "./sampling.js";
import type { Progress, Source } from "./sources.js";
import type { Message as ChatMessage } from "./tokenizer.js";

export type Files = [name: string, file: Source][];

export interface LoadOptions {
  /** Threads of the engine, its own among them; half of the processors where it is left out. */
  threads?: number;
  /** Tokens of the longest sequence; the model's own where it is left out, up to 4096. */
  contextLength?: number;
  /** Bytes of keys and values; enough for one sequence of contextLength where it is left out. */
  kvBytes?: number;
  /** Samples that are computed at a time. */
  maxBatch?: number;
  /** The format of all weights, such as "q8_0" or "float32"; left out, quantised weights stay what they are, and floats are taken as bf16. */
  weights?: string;
}

export interface FileOptions {
  /** Of the file, or of each by name: 64 hexadecimal digits. A download that has them is not asked for again. */
  sha256?: string | Readonly<Record<string, string>>;
  /** Keep downloads in the browser's private file system; true where it is left out. */
  cache?: boolean;
}

export interface PromptOptions {
  /** JSON schemas of functions, for the chat template. */
  tools?: unknown[];
  /** End where the assistant begins; true where it is left out. */
  addGenerationPrompt?: boolean;
  /** Further variables of the chat template, such as enable_thinking. */
  templateOptions?: Record<string, unknown>;
}

/** A text, messages for the model's chat template, or token ids. */
export type Prompt = string | readonly ChatMessage[] | ArrayLike<number>;

export interface Request {
  prompt: string | ChatMessage[] | Int32Array;
  options: PromptOptions;
  sampling: Settings;
  /** Whether the model's own stop tokens end a sample. */
  stopsByItself: boolean;
  n: number;
  promptIndex: number;
  adapter: number;
}

export interface Token {
  /** Which of the n samples. */
  sample: number;
  token: number;
  /** The whole characters that the token completes; special tokens have none. With `stop` never what could begin a stop string. Empty of a model without a tokenizer. */
  text: string;
  /** Of the distribution that the token was drawn from. */
  logprob: number;
  /** Of `topLogprobs`: the most probable tokens of the same distribution, the most probable first; none of probability 0. */
  topLogprobs?: { token: number; logprob: number }[];
  /** Of the sample's last token: why it ended. */
  finish?: "stop" | "length";
}

/** "threads": relaxed SIMD and shared memory; "threads-plain": SIMD128 and shared memory; "plain": only SIMD128. */
export type Build = "threads" | "threads-plain" | "plain";

export interface Info {
  architecture: string;
  parameters: number;
  contextLength: number;
  vocabSize: number;
  threads: number;
  build: Build;
  /** Whether the bits are native Whet's: this engine of WebAssembly fuses multiply and add. */
  exact: boolean;
  /** Formats of the weights, each once. */
  formats: string[];
  /** Whether messages can be prompts. */
  hasChatTemplate: boolean;
  weightsBytes: number;
  kvBytes: number;
  /** All memory of the engine's WebAssembly. */
  memoryBytes: number;
}

export interface Estimate {
  architecture: string;
  parameters: number;
  contextLength: number;
  formats: string[];
  /** Of the download. */
  fileBytes: number;
  weightsBytes: number;
  kvBytes: number;
}

export interface Measure {
  tokens: number;
  context: number;
}

export type Call =
  | { method: "load"; files: Files; options: LoadOptions & FileOptions; isolated: boolean }
  | { method: "estimate"; files: Files; options: Pick<LoadOptions, "contextLength" | "weights"> }
  | { method: "generate"; request: Request }
  | { method: "measure"; messages: ChatMessage[]; options: PromptOptions }
  | { method: "logprobs"; prompt: string | Int32Array; start: number; temperature: number; adapter: number }
  | { method: "tokenize"; text: string; addSpecialTokens: boolean }
  | { method: "detokenize"; tokens: Int32Array }
  | { method: "render"; messages: ChatMessage[]; options: PromptOptions }
  | { method: "loadAdapter"; files: Files; options: FileOptions }
  | { method: "removeAdapter"; adapter: number }
  | { method: "info" };

export type Message = { id: number; call: Call } | { id: number; abort: true };

export type Answer =
  | { id: number; event: Token[] | Progress }
  | { id: number; result: unknown }
  | { id: number; error: { name: string; message: string } };
