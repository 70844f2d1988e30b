/** RoPE frequencies under the scalings of Hugging Face models, in float64; formulas and sources: whet.ops.rope_scaling. */
import type { Core } from "../core/core.js";
import { show, WhetError } from "../core/errors.js";

export interface Frequencies {
  /** Radians per position, one per rotated pair. */
  invFreq: number[];
  /** Factor of cosines and sines. */
  attentionFactor: number;
}

/** Checked access to rope_parameters; every setting must be used. */
class RopeSettings {
  private readonly used = new Set(["rope_type", "type"]);

  constructor(
    private readonly given: Readonly<Record<string, unknown>>,
    readonly length: number,
    private readonly where: string,
  ) {}

  invalid(name: string, expected: string): WhetError {
    return new WhetError(`${this.where}: rotary embedding: ${name} is ${show(this.given[name])}, expected ${expected}.`);
  }

  get(name: string): unknown {
    this.used.add(name);
    return this.given[name] ?? undefined;
  }

  number(name: string, fallback?: number, above = 0, highest = Infinity): number {
    const value = this.get(name) ?? fallback;
    if (typeof value !== "number" || !(value > above && value <= highest) || !Number.isFinite(value)) {
      throw this.invalid(name, `a number above ${above}${highest < Infinity ? ` and at most ${highest}` : ""}`);
    }
    return value;
  }

  numbers(name: string, n: number): number[] {
    const value = this.get(name);
    if (!Array.isArray(value) || value.length !== n || !value.every((x) => x > 0)) throw this.invalid(name, `${n} numbers above 0, one per rotated pair`);
    return value;
  }

  original(): number {
    return this.number("original_max_position_embeddings", undefined, 1);
  }

  factor(): number {
    return this.number("factor", this.length / this.original());
  }

  checkAllUsed(kind: string): void {
    const unknown = Object.keys(this.given).find((name) => !this.used.has(name));
    if (unknown !== undefined) throw new WhetError(`${this.where}: rotary embedding: ${unknown} is not a setting of ${kind}.`);
  }
}

/** Return the frequencies of rope_parameters. `rotaryDim`: rotated elements of a head. Default: headDim * partial_rotary_factor. */
export function ropeFrequencies(core: Core, headDim: number, rotaryDim: number | undefined, length: number, given: Readonly<Record<string, unknown>>, where: string): Frequencies {
  const settings = new RopeSettings(given, length, where);
  const kind = String(given.rope_type ?? "default");
  const log = (x: number) => core.call("logarithm", x);
  const power = (x: number, y: number) => core.call("power", x, y);
  const base = settings.number("rope_theta", 10000, 1);
  const fraction = settings.number("partial_rotary_factor", 1, 0, 1);
  const dim = rotaryDim ?? (kind === "proportional" ? headDim : Math.trunc(headDim * fraction));
  if (!Number.isInteger(dim) || dim < 2 || dim % 2 !== 0 || dim > headDim) throw new WhetError(`${where}: rotary embedding: the rotary dimension is ${dim}, expected an even number up to ${headDim}.`);
  const frequencies = (theta: number) => Array.from({ length: dim / 2 }, (_, i) => power(theta, -(2 * i) / dim));
  const plain = frequencies(base);
  const kinds: Record<string, () => [number[], number]> = {
    default: () => [plain, 1],
    linear: () => {
      const factor = settings.number("factor");
      return [plain.map((f) => f / factor), 1];
    },
    dynamic: () => {
      const [factor, original] = [settings.number("factor"), settings.original()];
      if (dim === 2) throw new WhetError(`${where}: rotary embedding: the rotary dimension is 2, expected at least 4 with dynamic scaling.`);
      const extended = Math.max(length, original);
      return [frequencies(base * power((factor * extended) / original - (factor - 1), dim / (dim - 2))), 1];
    },
    yarn: () => {
      const [factor, original] = [settings.factor(), settings.original()];
      const pairAt = (rotations: number) => (dim * log(original / (rotations * 2 * Math.PI))) / (2 * log(base));
      let [low, high] = [pairAt(settings.number("beta_fast", 32)), pairAt(settings.number("beta_slow", 1))];
      if (settings.get("truncate") ?? true) [low, high] = [Math.floor(low), Math.ceil(high)];
      [low, high] = [Math.max(low, 0), Math.min(high, dim - 1)];
      const ramp = plain.map((_, i) => Math.min(Math.max((i - low) / (high - low || 0.001), 0), 1));
      const scaled = (weight: number) => (factor > 1 ? 0.1 * weight * log(factor) + 1 : 1);
      const weights = ["mscale", "mscale_all_dim"].map((name) => settings.number(name, 0, -Infinity));
      const inferred = weights.every(Boolean) ? scaled(weights[0]) / scaled(weights[1]) : scaled(1);
      return [plain.map((f, i) => f * (ramp[i] / factor + 1 - ramp[i])), settings.number("attention_factor", inferred)];
    },
    llama3: () => {
      const [factor, original, low, high] = [settings.number("factor"), settings.original(), settings.number("low_freq_factor"), settings.number("high_freq_factor")];
      if (high <= low) throw settings.invalid("high_freq_factor", `above low_freq_factor=${low}`);
      const smooth = plain.map((f) => Math.min(Math.max(((original * f) / (2 * Math.PI) - low) / (high - low), 0), 1));
      return [plain.map((f, i) => f * ((1 - smooth[i]) / factor + smooth[i])), 1];
    },
    longrope: () => {
      const [factor, original] = [settings.factor(), settings.original()];
      const [short, long] = ["short_factor", "long_factor"].map((name) => settings.numbers(name, dim / 2));
      const divisors = length > original ? long : short;
      const inferred = factor > 1 ? Math.sqrt(1 + log(factor) / log(original)) : 1;
      return [plain.map((f, i) => f / divisors[i]), settings.number("attention_factor", inferred)];
    },
    proportional: () => {
      const factor = settings.number("factor", 1);
      return [plain.map((f, i) => (i < Math.trunc((fraction * dim) / 2) ? f / factor : 0)), 1];
    },
  };
  if (!Object.hasOwn(kinds, kind)) throw settings.invalid("rope_type", `one of ${Object.keys(kinds).join(", ")}`);
  const [invFreq, attentionFactor] = kinds[kind]();
  settings.checkAllUsed(kind);
  return { invFreq, attentionFactor };
}
