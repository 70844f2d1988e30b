/** Messages between a Learner and its host in the engine's worker. */
import type { Files } from "../files/sources.js";
import type { Message } from "../text/tokenizer.js";
import type { Row } from "./batch.js";

/** Adapters to create, checked. */
export interface AdapterSettings {
  /** Saved adapters, which determine rank, alpha and targets. */
  files?: Files;
  rank: number;
  alpha: number;
  /** Ends of module names; empty: all linear layers except the head. */
  targets: readonly string[];
  seed: bigint;
}

/** Settings of a step of AdamW, checked. */
export interface StepSettings {
  learningRate: number;
  adamBeta1: number;
  adamBeta2: number;
  adamEpsilon: number;
  weightDecay: number;
  maxGradNorm: number;
}

/** A prompt, and the completion that is trained on unless it is sampled later. */
export interface Example {
  prompt: string | Message[] | Int32Array;
  completion?: string | Int32Array;
}

/** Factors, or their gradients, of the adapter of a module with n outputs and k inputs, as in PEFT: W + (alpha / rank) b a. */
export interface Factors {
  rank: number;
  /** (rank, k), row by row. */
  a: Float32Array;
  /** (n, rank), row by row. */
  b: Float32Array;
}

export interface LearnerInfo {
  /** Number of trained parameters. */
  nParameters: number;
  /** Name or URL of the model's file or folder. */
  model: string;
  alpha: number;
  /** Whether any matrix of the model is quantised, for which an engine rounds inputs to 8 bits and a learner does not. */
  isQuantised: boolean;
}

/** Record of the base that adapters were trained on, whet_base.json. */
export interface BaseRecord {
  weights: string | null;
  embedding: null;
  head: null;
  formats: string;
  is_quantised: boolean;
  digest: string;
}

/** Data of a PEFT folder. */
export interface Saved {
  factors: Map<string, Factors>;
  targetModules: string[];
  record: BaseRecord;
}

/** Actions, and their results. `where` is the prefix of error messages. */
export interface Actions {
  create: [settings: AdapterSettings, result: LearnerInfo];
  encode: [rows: Example[], result: Row[]];
  logprobs: [given: { rows: readonly Row[]; temperature: number; adapters: boolean; keep: boolean }, result: Float32Array];
  backward: [gradient: Float32Array, result: void];
  zeroGrad: [given: undefined, result: void];
  step: [settings: StepSettings, result: number];
  sync: [given: undefined, result: number];
  gradients: [given: undefined, result: Map<string, Factors>];
  save: [given: undefined, result: Saved];
  close: [given: undefined, result: void];
}

export type Action = keyof Actions;
export type LearnRequest = { [A in Action]: { action: A; given: Actions[A][0]; where: string } }[Action];
