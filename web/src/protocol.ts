/** What goes between an Engine and its worker. */
import type { Source } from "./reader.js";

export interface LoadOptions {
  /** Threads of the engine, its own among them; half of the processors where it is left out. */
  threads?: number;
  /** Tokens of the longest sequence; the model's own where it is left out, up to 4096. */
  contextLength?: number;
  /** Bytes of keys and values; enough for one sequence of contextLength where it is left out. */
  kvBytes?: number;
  /** Sequences that are sampled at a time. */
  maxBatch?: number;
}

export interface Sampling {
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  repetitionPenalty?: number;
  presencePenalty?: number;
  frequencyPenalty?: number;
  maxNewTokens?: number;
  minNewTokens?: number;
  /** Tokens after which a sample ends. */
  stopTokens?: number[];
  /** Samples of the prompt. */
  n?: number;
  seed?: number;
  promptIndex?: number;
  /** The number that loadAdapter gave. */
  adapter?: number;
}

export interface Token {
  /** Which of the n samples. */
  sample: number;
  token: number;
  logprob: number;
  /** Of the sample's last token: why it ended. */
  finish?: "stop" | "length" | "cancelled";
}

export interface Info {
  architecture: string;
  parameters: number;
  contextLength: number;
  vocabSize: number;
  threads: number;
  /** "threads": relaxed SIMD and shared memory; "plain": SIMD128 alone. */
  build: "threads" | "plain";
  /** Whether the bits are native Whet's: this engine of WebAssembly fuses multiply and add. */
  exact: boolean;
  /** Formats of the weights, each once. */
  formats: string[];
  weightsBytes: number;
  kvBytes: number;
  memoryBytes: number;
}

/** One matrix of an adapter: W[firstRow ...] += b a, with a (rank, k) and b (n, rank), the scaling in b. */
export interface AdapterPart {
  layer: number;
  target: "qkv" | "o" | "up" | "down";
  firstRow: number;
  rank: number;
  a: Float32Array;
  b: Float32Array;
}

export type Call =
  | { method: "load"; source: Source; options: LoadOptions; isolated: boolean }
  | { method: "generate"; prompt: Int32Array; sampling: Sampling }
  | { method: "logprobs"; tokens: Int32Array; scoreFrom: number; temperature: number; adapter: number }
  | { method: "loadAdapter"; parts: AdapterPart[] }
  | { method: "removeAdapter"; adapter: number }
  | { method: "info" };

export type Message = { id: number; call: Call } | { id: number; abort: true };

export type Answer =
  | { id: number; event: unknown }
  | { id: number; result: unknown }
  | { id: number; error: { name: string; message: string } };
