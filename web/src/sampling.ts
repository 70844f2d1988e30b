/** Checks of sampling settings: the names, defaults and ranges of whet.SamplingParams. */
import { WhetError } from "./errors.js";
import { sampling as SAMPLING } from "./facts.js";

export interface Sampling {
  /** Divides the logits; 0 takes the most probable token. */
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  repetitionPenalty?: number;
  presencePenalty?: number;
  frequencyPenalty?: number;
  minNewTokens?: number;
  /** Longest completion, the stop token included. */
  maxNewTokens?: number;
  /** A completion ends with, and includes, the first of these; of a text prompt also the model's own. */
  stopTokenIds?: readonly number[];
  /** Completions depend only on (seed, prompt index, sample index, position). */
  seed?: number;
}

const isCount = (x: unknown) => Number.isInteger(x) && (x as number) >= 0;
const isNumber = (x: unknown): x is number => typeof x === "number" && Number.isFinite(x);
const RANGES: Record<string, (x: any) => boolean> = {
  "a finite number >= 0": (x) => isNumber(x) && x >= 0,
  "an integer >= 0": isCount,
  "an integer >= 1": (x) => isCount(x) && x >= 1,
  "a number in (0, 1]": (x) => isNumber(x) && x > 0 && x <= 1,
  "a number in [0, 1)": (x) => isNumber(x) && x >= 0 && x < 1,
  "a finite number > 0": (x) => isNumber(x) && x > 0,
  "a number from -2 to 2": (x) => isNumber(x) && x >= -2 && x <= 2,
  "token ids >= 0": (x) => x !== null && typeof x === "object" && typeof x.length === "number" && Array.from(x).every(isCount),
  "an integer from 0 to 2^64 - 1": (x) => isCount(x) && Number.isSafeInteger(x),
};
const SETTINGS = SAMPLING as Record<string, { default: unknown; expected: string }>;
/** Settings that the engine has in Python, and this package not yet. */
const REFUSED = new Set(["logitBias", "stop", "topLogprobs"]);

/** The settings with the defaults of those that are left out. */
export function checkSampling(given: Record<string, unknown>, where: string): Required<Sampling> {
  const found: Record<string, unknown> = {};
  for (const [name, { default: value }] of Object.entries(SETTINGS)) if (!REFUSED.has(name)) found[name] = value;
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined) continue;
    if (!(name in found)) throw new WhetError(`${where}: there is no setting ${name}. There are: ${Object.keys(found).join(", ")}.`);
    const { expected } = SETTINGS[name];
    if (!RANGES[expected](value)) {
      const limit = name === "seed" ? " (in JavaScript up to 2^53 - 1)" : "";
      throw new WhetError(`${where}: ${name} is ${show(value)}, expected ${expected}${limit}.`);
    }
    found[name] = value;
  }
  const checked = found as unknown as Required<Sampling>;
  if (checked.minNewTokens > checked.maxNewTokens) {
    throw new WhetError(`${where}: minNewTokens is ${checked.minNewTokens}, expected at most maxNewTokens=${checked.maxNewTokens}.`);
  }
  return checked;
}

export function show(value: unknown): string {
  if (typeof value === "number" || typeof value === "bigint" || value === undefined) return String(value);
  if (typeof value === "function" || typeof value === "symbol") return `a ${typeof value}`;
  try {
    return (JSON.stringify(value) ?? String(value)).slice(0, 80);
  } catch {
    return Object.prototype.toString.call(value);
  }
}
