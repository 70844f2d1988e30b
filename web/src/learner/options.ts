/** Options of a Learner, with the names, defaults and ranges of whet.Learner, SFTConfig and GRPOConfig. */
import { show, WhetError } from "../core/errors.js";
import { learning, sampling } from "../facts.js";
import { listFiles, type Sources } from "../files/sources.js";
import { checkSampling, checkSettings, type Sampling, type Settings } from "../settings/sampling.js";
import type { Message } from "../text/tokenizer.js";
import type { AdapterSettings, StepSettings } from "./protocol.js";

export interface LearnerOptions {
  /** Saved adapters to train further, as for Engine.loadAdapter, which determine rank, alpha and targets. */
  adapter?: Sources;
  /** Rank of every adapter. Default: 16. */
  rank?: number;
  /** Adapters are multiplied by alpha / rank. Default: rank. */
  alpha?: number;
  /** Modules with an adapter: names or their ends, such as "q_proj", as PEFT's target_modules. Default: all linear layers except the head. */
  targets?: readonly string[];
  /** Seed of the initial A, as in Python; B is zero. Default: 0. */
  seed?: number | bigint;
}

/** Settings of AdamW. */
export interface StepOptions extends Partial<StepSettings> {
  /** Default: 1e-4 in step, 2e-5 in sft, 1e-6 in grpo, which is low for adapters: try 1e-4 to 1e-3. */
  learningRate?: number;
  /** Gradients with a larger norm are scaled to it; 0: never. Default: 1. */
  maxGradNorm?: number;
}

/** What a step of sft or grpo did. */
export interface LearnProgress {
  /** From 1 to `steps`. */
  step: number;
  steps: number;
  loss: number;
  /** Norm of the gradient before it is clipped. */
  gradNorm: number;
  /** Completion tokens of the step. */
  nTokens: number;
  /** grpo: mean reward of the step's completions, before its update. */
  meanReward?: number;
}

export interface RunOptions extends StepOptions {
  /** Number of updates (of grpo: of batches). Default: as many as give each row one turn. */
  steps?: number;
  /** Rows of a step, taken in their order, from the first again after the last. Default: 8. */
  batchSize?: number;
  /** Tokens of a forward and backward pass; fewer need less memory, and give the same gradients. 0: no limit. Default: 768. */
  maxTokensPerStep?: number;
  onProgress?: (progress: LearnProgress) => void;
  /** Ends the run between two passes; the steps so far remain. */
  signal?: AbortSignal;
}

/** A text or messages with a text as completion, or token ids with token ids. */
export interface SftRow {
  prompt: string | readonly Message[] | ArrayLike<number>;
  completion: string | ArrayLike<number>;
}

export interface GrpoRow {
  prompt: string | readonly Message[] | ArrayLike<number>;
}

/** A sampled completion. */
export interface Completion {
  text: string;
  tokens: number[];
  /** "length": it reached maxNewTokens. */
  finish: "stop" | "length";
}

export interface GrpoOptions<R extends GrpoRow = GrpoRow> extends RunOptions, Sampling {
  /** Returns a finite number, or a promise of one; called in the page, with the row that the prompt is from. */
  reward: (completion: Completion, row: R) => number | Promise<number>;
  /** Completions per prompt, at least 2. Default: 8. */
  groupSize?: number;
  /** Updates per batch of completions. Default: 1. */
  numIterations?: number;
  /** The probability ratio is clipped to 1 - epsilon ... 1 + epsilon. Default: 0.2. */
  epsilon?: number;
  /** Maximum importance weight of tokens sampled from a quantised model. Default: 3. */
  samplerCap?: number;
}

export type Run = StepSettings & { steps: number; batchSize: number; maxTokensPerStep: number };
export type GrpoRun = Run & { groupSize: number; numIterations: number; epsilon: number; samplerCap: number; temperature: number; seed: bigint };

const COUNT = "an integer >= 1";
const ADAPTERS: Settings = {
  rank: { default: 16, expected: COUNT },
  alpha: { default: undefined, expected: "a finite number > 0" },
  targets: { default: [], expected: "at most 64 strings that are not empty, of whole characters" },
  seed: { default: 0, expected: "an integer from 0 to 2^64 - 1" },
};

export function checkLearnerOptions(given: LearnerOptions, where: string): AdapterSettings {
  const { adapter, ...own } = checkObject(given, where) as LearnerOptions;
  const { rank, alpha = rank, targets, seed } = checkSettings(ADAPTERS, { ...own }, where);
  const [extra] = adapter === undefined ? [] : Object.keys(own);
  if (extra !== undefined) throw new WhetError(`${where}: ${extra} is ${show(own[extra as keyof typeof own])}, but the saved adapter determines it. Omit it.`);
  return { files: adapter === undefined ? undefined : listFiles(adapter, where), rank, alpha, targets: [targets].flat(), seed: BigInt(seed) };
}

export const checkStep = (given: StepOptions, where: string) => checkSettings(learning.step, checkObject(given, where), where) as StepSettings;

/** Check the options of a run, and fill in the defaults; `steps` for this many rows. */
function checkRun(settings: Settings, { onProgress, ...given }: Omit<RunOptions, "signal">, nRows: number, where: string): Run {
  if (onProgress !== undefined && typeof onProgress !== "function") throw new WhetError(`${where}: onProgress is ${show(onProgress)}, expected a function.`);
  const found = checkSettings({ ...settings, steps: { default: 0, expected: COUNT } }, given as Record<string, unknown>, where);
  return { ...found, steps: found.steps || Math.ceil(nRows / found.batchSize) } as Run;
}

export const checkSft = (given: Omit<RunOptions, "signal">, nRows: number, where: string) => checkRun(learning.sft, given, nRows, where);

/** Check the options of grpo; return the run, and the options for Engine.generate. */
export function checkGrpo({ reward, ...given }: Omit<GrpoOptions, "signal">, nRows: number, where: string): { run: GrpoRun; drawn: Sampling } {
  if (typeof reward !== "function") throw new WhetError(`${where}: reward is ${show(reward)}, expected a function of a completion and its row that returns a number.`);
  const select = (isDrawn: boolean) => Object.fromEntries(Object.entries(given).filter(([name]) => name in sampling === isDrawn));
  const drawn: Sampling = { maxNewTokens: learning.maxNewTokens, ...select(true) };
  const { temperature, seed } = checkSampling({ ...drawn }, where);
  if (temperature === 0) throw new WhetError(`${where}: temperature is 0, expected a number > 0: greedy completions of a group are equal.`);
  return { run: { ...(checkRun(learning.grpo, select(false), nRows, where) as GrpoRun), temperature, seed }, drawn };
}

export function checkObject(options: unknown, where: string): Record<string, unknown> {
  if (typeof options !== "object" || options === null) throw new WhetError(`${where}: options is ${show(options)}, expected an object.`);
  return options as Record<string, unknown>;
}

/** Check that `rows` has at least one object with these fields. */
export function checkRows(rows: unknown, fields: readonly string[], where: string): void {
  if (!Array.isArray(rows) || rows.length === 0) throw new WhetError(`${where}: rows is ${show(rows)}, expected an array of at least one {${fields.join(", ")}}.`);
  for (const [i, row] of rows.entries()) {
    const missing = fields.find((field) => row?.[field] === undefined || row[field] === null || row[field].length === 0);
    if (missing !== undefined) throw new WhetError(`${where}: rows[${i}] is ${show(row)}, which has no ${missing}. Pass {${fields.join(", ")}}, neither of them empty.`);
  }
}
