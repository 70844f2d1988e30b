/** Checks of settings, with the names, defaults and ranges of Python; of sampling as in whet.SamplingParams. */
import { show, WhetError } from "../core/errors.js";
import { type learning, sampling as SAMPLING } from "../facts.js";

export interface Sampling {
  /** Divides the logits; 0: greedy. */
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  repetitionPenalty?: number;
  presencePenalty?: number;
  frequencyPenalty?: number;
  minNewTokens?: number;
  /** Maximum length of a completion, including its stop token. */
  maxNewTokens?: number;
  /** A completion ends with the first of these, which it includes. Text prompts also end with the model's stop tokens. */
  stopTokenIds?: readonly number[];
  /** The text of a completion ends before the first of these, also across tokens. The name of a special token makes it a stop token. */
  stop?: string | readonly string[];
  /** Token id -> number added to its logit, from -100 to 100. */
  logitBias?: Readonly<Record<number, number>>;
  /** Number of most probable alternatives to return with each token, at most 20. */
  topLogprobs?: number;
  /** Completions depend only on (seed, prompt index, sample index, position). A bigint above 2^53 - 1. */
  seed?: number | bigint;
}

/** All settings, normalised for the engine's worker. */
export interface SamplingSettings extends Required<Omit<Sampling, "stop" | "logitBias" | "stopTokenIds" | "seed">> {
  stopTokenIds: number[];
  stop: string[];
  logitBias: [token: number, bias: number][];
  seed: bigint;
}

const isCount = (x: unknown) => Number.isInteger(x) && (x as number) >= 0;
const isNumber = (x: unknown): x is number => typeof x === "number" && Number.isFinite(x);
const isWhole = (x: unknown) => typeof x === "string" && x !== "" && !/\p{Surrogate}/u.test(x);
/** Whether a temperature is a normal float32 divisor. */
export const isTemperature = (x: unknown) => isNumber(x) && x >= 1e-30 && x <= 1e30;
// Python's texts: a change there is a type error here
type Expected = (typeof SAMPLING)[keyof typeof SAMPLING]["expected"] | (typeof learning.grpo)[keyof typeof learning.grpo]["expected"];
const RANGES: Record<Expected, (x: any) => boolean> = {
  "a finite number >= 0: 0, or from 1e-30 to 1e30": (x) => x === 0 || isTemperature(x),
  "an integer >= 0": isCount,
  "an integer >= 1": (x) => isCount(x) && x >= 1,
  "a number in (0, 1]": (x) => isNumber(x) && x > 0 && x <= 1,
  "an integer >= 2: the advantage of a single completion is 0": (x) => isCount(x) && x >= 2,
  "a finite number >= 0": (x) => isNumber(x) && x >= 0,
  "a number > 0": (x) => typeof x === "number" && x > 0,
  "a number in [0, 1)": (x) => isNumber(x) && x >= 0 && x < 1,
  "a finite number > 0": (x) => isNumber(x) && x > 0,
  "a number from -2 to 2": (x) => isNumber(x) && x >= -2 && x <= 2,
  "token ids >= 0": (x) => x !== null && typeof x === "object" && typeof x.length === "number" && Array.from(x).every(isCount),
  "token ids >= 0 with numbers from -100 to 100": (x) =>
    typeof x === "object" && x !== null && !Array.isArray(x) && Object.entries(x).every(([id, bias]) => /^\d+$/.test(id) && isNumber(bias) && Math.abs(bias) <= 100),
  "at most 64 strings that are not empty, of whole characters": (x) => isWhole(x) || (Array.isArray(x) && x.length <= 64 && x.every(isWhole)),
  "an integer from 0 to 20": (x) => isCount(x) && x <= 20,
  "an integer from 0 to 2^64 - 1": (x) => (isCount(x) && Number.isSafeInteger(x)) || (typeof x === "bigint" && x >= 0n && x < 1n << 64n),
};
export type Settings = Readonly<Record<string, { default: unknown; expected: Expected }>>;
export const DEFAULTS = { maxNewTokens: SAMPLING.maxNewTokens.default, seed: SAMPLING.seed.default };

/** Check settings and fill in the defaults. */
export function checkSettings(settings: Settings, given: Record<string, unknown>, where: string): Record<string, any> {
  const found: Record<string, any> = Object.fromEntries(Object.entries(settings).map(([name, setting]) => [name, setting.default]));
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined) continue;
    if (!(name in found)) throw new WhetError(`${where}: unknown setting ${name}. Settings: ${Object.keys(found).join(", ")}.`);
    const { expected } = settings[name];
    if (!RANGES[expected](value)) {
      const limit = name === "seed" ? " (above 2^53 - 1 as a bigint)" : "";
      throw new WhetError(`${where}: ${name} is ${show(value)}, expected ${expected}${limit}.`);
    }
    found[name] = value;
  }
  return found;
}

/** Check sampling settings and fill in the defaults. */
export function checkSampling(given: Record<string, unknown>, where: string): SamplingSettings {
  const found = checkSettings(SAMPLING, given, where);
  if (found.minNewTokens > found.maxNewTokens) {
    throw new WhetError(`${where}: minNewTokens is ${found.minNewTokens}, expected at most maxNewTokens=${found.maxNewTokens}.`);
  }
  return {
    ...found,
    stopTokenIds: Array.from(found.stopTokenIds),
    stop: [found.stop].flat(),
    logitBias: Object.entries(found.logitBias).map(([id, bias]) => [Number(id), bias]),
    seed: BigInt(found.seed),
  } as SamplingSettings;
}

/** Return the seed of reply n, as in whet chat. An invalid seed is returned unchanged, for checkSampling. */
export function addToSeed(seed: number | bigint = DEFAULTS.seed, n: number): number | bigint {
  return RANGES[SAMPLING.seed.expected](seed) ? BigInt.asUintN(64, BigInt(seed) + BigInt(n)) : seed;
}

