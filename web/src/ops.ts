/** Primitives and kernels on typed arrays: float32, on the calling thread, named as in Python.
 *
 * The Python functions in src/whet/ops document each of them; results are bit-identical if `exact`. Arrays are copied into the
 * module's memory and back. */
import type { Core } from "./core/core.js";
import { show, WhetError } from "./core/errors.js";
import { startCore } from "./core/start.js";
import { enums, opCalls } from "./facts.js";

type Floats = ArrayLike<number>;
const MAX_RANK = 8;

function fail(name: string, what: string, value: unknown, expected: string): never {
  throw new WhetError(`${name}: ${what} is ${show(value)}, expected ${expected}.`);
}

function floats(name: string, what: string, x: unknown, length?: number): Float32Array {
  if (!Array.isArray(x) && !ArrayBuffer.isView(x)) fail(name, what, x, "numbers, as in a Float32Array");
  const array = x instanceof Float32Array ? x : Float32Array.from(x as Floats);
  if (length !== undefined && array.length !== length) throw new WhetError(`${name}: ${what} has ${array.length} numbers, expected ${length}.`);
  return array;
}

function size(name: string, what: string, value: unknown): number {
  if (!Number.isSafeInteger(value) || (value as number) < 1) fail(name, what, value, "an integer >= 1");
  return value as number;
}

function number(name: string, what: string, value: unknown, isRight: (x: number) => boolean, expected: string): number {
  if (typeof value !== "number" || !isRight(value)) fail(name, what, value, expected);
  return value;
}

/** Return the shape of rows of `columns` numbers. Default: one row. */
function rowsOf(name: string, x: Float32Array, columns: number | undefined): [rows: number, columns: number] {
  const n = columns === undefined ? x.length : size(name, "columns", columns);
  if (n === 0 || x.length % n !== 0) throw new WhetError(`${name}: got ${x.length} numbers, expected at least one row of ${n}, and whole rows.`);
  return [x.length / n, n];
}

function integers(name: string, what: string, x: ArrayLike<number>, length: number, below: number): number[] {
  if (x?.length !== length) throw new WhetError(`${name}: ${what} has ${x?.length} numbers, expected ${length}.`);
  const found = Array.from(x);
  const bad = found.find((value) => !Number.isSafeInteger(value) || value < 0 || value >= below);
  if (bad !== undefined) fail(name, what, bad, `integers from 0 to ${below - 1}`);
  return found;
}

interface AttentionOptions {
  heads: number;
  kvHeads?: number;
  headDim: number;
  /** Number of last keys that a query attends to, including its own position. Default: all. */
  window?: number;
  /** Scale of the scores. Default: headDim^-1/2. */
  scale?: number;
}

/** Check the arguments of attention. */
function checkAttention(name: string, q: Floats, k: Floats, v: Floats, { heads, kvHeads = heads, headDim, window, scale }: AttentionOptions) {
  for (const [what, value] of Object.entries({ heads, kvHeads, headDim })) size(name, what, value);
  if (heads % kvHeads !== 0) fail(name, "heads", heads, `a multiple of kvHeads=${kvHeads}`);
  if (headDim < 32 || headDim > 512 || headDim % 8 !== 0) fail(name, "headDim", headDim, "a multiple of 8 from 32 to 512");
  if (window !== undefined) size(name, "window", window);
  const [queries, keys] = [floats(name, "q", q), floats(name, "k", k)];
  const values = floats(name, "v", v, keys.length);
  const [nQueries] = rowsOf(`${name}: q`, queries, heads * headDim);
  const [nKeys] = rowsOf(`${name}: k`, keys, kvHeads * headDim);
  const factor = number(name, "scale", scale ?? 1 / Math.sqrt(headDim), Number.isFinite, "a finite number");
  return { given: [queries, keys, values], heads, kvHeads, headDim, nQueries, nKeys, factor };
}

export class Ops {
  private constructor(
    private readonly core: Core,
    /** Whether results are bit-identical to the native kernels'. */
    readonly exact: boolean,
  ) {}

  /** @internal */
  static readonly calls = opCalls;

  /** Load the module. `assets`: URL of the folder with the package's wasm files. Default: this script's folder. */
  static async load({ assets }: { assets?: string | URL } = {}): Promise<Ops> {
    const { core } = await startCore(globalThis.crossOriginIsolated !== false, "Ops.load", { assets });
    return new Ops(core, core.call("is_fused") === 1);
  }

  /** Call an export with copies of arrays (null: a null pointer) and new float32 results of these lengths. */
  private run<A>(call: (core: Core, args: A) => number, arrays: (ArrayBufferView | null)[], results: number[], args: (at: number[], out: number[]) => A): Float32Array[] {
    const given = arrays.filter((array) => array !== null);
    const outputs = results.map((n) => new Float32Array(n));
    return this.core.with([...given, ...outputs], (...addresses) => {
      let next = 0;
      const at = arrays.map((array) => (array === null ? 0 : addresses[next++]));
      const out = addresses.slice(given.length);
      call(this.core, args(at, out));
      return results.map((n, i) => this.core.floats(out[i], n));
    });
  }

  computeGroupAdvantages(rewards: Floats, options: { ddof?: 0 | 1; eps?: number } = {}): Float32Array {
    return this.computeBatchGroupAdvantages(rewards, rewards.length, options);
  }

  computeBatchGroupAdvantages(
    rewards: Floats,
    groupSize: number,
    { scale = "group", ddof = 0, eps }: { scale?: (typeof enums.scale)[number]; ddof?: 0 | 1; eps?: number } = {},
  ): Float32Array {
    const name = "computeBatchGroupAdvantages";
    const r = floats(name, "rewards", rewards);
    if (!enums.scale.includes(scale)) fail(name, "scale", scale, "group, batch or none");
    if (ddof !== 0 && ddof !== 1) fail(name, "ddof", ddof, "0 (population) or 1 (sample)");
    if (eps !== undefined) number(name, "eps", eps, (x) => x >= 0 && x < Infinity, "a finite number >= 0, or none");
    const [groups, n] = rowsOf(name, r, size(name, "groupSize", groupSize));
    return this.run(opCalls.op_group_advantages, [r], [r.length], ([rewards], [out]) => ({ rewards, nGroups: groups, groupSize: n, scale: enums.scale.indexOf(scale), ddof, eps: eps ?? -1, out }))[0];
  }

  computeTokenKl(policy: Floats, reference: Floats, options: { mask?: ArrayLike<number | boolean> } = {}): number {
    return this.tokenKl("computeTokenKl", false, policy, reference, undefined, options)[0];
  }
  computeTokenKlSchulman(policy: Floats, reference: Floats, options: { mask?: ArrayLike<number | boolean> } = {}): number {
    return this.tokenKl("computeTokenKlSchulman", true, policy, reference, undefined, options)[0];
  }
  computeBatchTokenKl(policy: Floats, reference: Floats, seqLen: number, options: { mask?: ArrayLike<number | boolean> } = {}): Float64Array {
    return this.tokenKl("computeBatchTokenKl", false, policy, reference, seqLen, options);
  }
  computeBatchTokenKlSchulman(policy: Floats, reference: Floats, seqLen: number, options: { mask?: ArrayLike<number | boolean> } = {}): Float64Array {
    return this.tokenKl("computeBatchTokenKlSchulman", true, policy, reference, seqLen, options);
  }

  private tokenKl(
    name: string, schulman: boolean, policy: Floats, reference: Floats, seqLen: number | undefined, { mask }: { mask?: ArrayLike<number | boolean> },
  ): Float64Array {
    const p = floats(name, "policy", policy);
    const q = floats(name, "reference", reference, p.length);
    const [rows, n] = rowsOf(name, p, seqLen);
    if (mask !== undefined && mask.length !== p.length) throw new WhetError(`${name}: mask has ${mask.length} entries, expected ${p.length}.`);
    const m = mask === undefined ? null : Uint8Array.from(mask as ArrayLike<number>, Number);
    const sums = this.run(opCalls.op_token_kl, [p, q, m], [2 * rows], ([p, q, mask], [sums]) => ({ schulman: +schulman, p, q, mask, rows, columns: n, sums }));
    return new Float64Array(sums[0].buffer);
  }

  /** Return the log-prob of one token per row of logits, and the row's entropy. */
  computeTokenLogprobs(logits: Floats, tokenIds: ArrayLike<number>, { temperature = 1 }: { temperature?: number } = {}): { logprobs: Float32Array; entropy: Float32Array } {
    const name = "computeTokenLogprobs";
    const x = floats(name, "logits", logits);
    const rows = size(name, "the length of tokenIds", tokenIds?.length);
    if (x.length === 0 || x.length % rows !== 0) throw new WhetError(`${name}: logits has ${x.length} numbers, expected a multiple of the ${rows} tokens.`);
    number(name, "temperature", temperature, (t) => t > 0 && t < Infinity, "a finite number above 0");
    const ids = BigInt64Array.from(integers(name, "tokenIds", tokenIds, rows, x.length / rows), BigInt);
    const [logprobs, entropy] = this.run(opCalls.op_token_logprobs, [x, ids], [rows, rows], ([logits, tokens], [logprobs, entropy]) => ({ logits, rows, n: x.length / rows, tokens, temperature, logprobs, entropy }));
    return { logprobs, entropy };
  }

  /** Generalised advantage estimation over trajectories of `length` steps. `lastValues`: one value per trajectory. */
  computeGae(
    rewards: Floats, values: Floats, dones: ArrayLike<number | boolean>, lastValues: number | Floats, gamma: number, lambda: number, length?: number,
  ): { advantages: Float32Array; returns: Float32Array } {
    const name = "computeGae";
    const r = floats(name, "rewards", rewards);
    const v = floats(name, "values", values, r.length);
    const [rows, n] = rowsOf(name, r, length);
    if (dones?.length !== r.length) throw new WhetError(`${name}: dones has ${dones?.length} entries, expected ${r.length}.`);
    const isShare = (x: number) => x >= 0 && x <= 1;
    number(name, "gamma", gamma, isShare, "a number in [0, 1]");
    number(name, "lambda", lambda, isShare, "a number in [0, 1]");
    const last = Float64Array.from(typeof lastValues === "number" ? [lastValues] : lastValues);
    if (last.length !== rows) throw new WhetError(`${name}: lastValues has ${last.length} numbers, expected ${rows}.`);
    const ended = Uint8Array.from(dones as ArrayLike<number>, Number);
    const [advantages, returns] = this.run(opCalls.op_gae, [r, v, ended, last], [r.length, r.length], ([rewards, values, dones, lastValues], [advantages, returns]) => ({ rewards, values, dones, lastValues, rows, n, gamma, lambda, advantages, returns }));
    return { advantages, returns };
  }

  /** First-fit decreasing: the indices of each bin, whose lengths sum to at most `maxLength`. */
  packSequences(lengths: ArrayLike<number>, maxLength: number): number[][] {
    const name = "packSequences";
    size(name, "maxLength", maxLength);
    const n = lengths?.length ?? 0;
    const given = BigInt64Array.from(integers(name, "lengths", lengths, n, maxLength + 1), BigInt);
    return this.core.with([given, new BigInt64Array(n), new BigInt64Array(n + 1)], (at, indices, begins) => {
      const count = opCalls.op_pack_sequences(this.core, { lengths: at, n, maxLength, indices, begins });
      const read = (from: number, length: number) => Array.from(new BigInt64Array(this.core.bytes(from, 8 * length).slice().buffer), Number);
      const [order, first] = [read(indices, n), read(begins, count + 1)];
      return Array.from({ length: count }, (_, i) => order.slice(first[i], first[i + 1]));
    });
  }

  rmsNorm(x: Floats, weight: Floats | null, { eps = 1e-6, columns }: { eps?: number; columns?: number } = {}): Float32Array {
    return this.norm("rmsNorm", opCalls.op_rms_norm, x, weight, null, eps, columns);
  }
  layerNorm(x: Floats, weight: Floats | null, bias: Floats | null, { eps = 1e-5, columns }: { eps?: number; columns?: number } = {}): Float32Array {
    return this.norm("layerNorm", opCalls.op_layer_norm, x, weight, bias, eps, columns);
  }
  private norm(name: string, call: typeof opCalls.op_layer_norm, x: Floats, weight: Floats | null, bias: Floats | null, eps: number, columns: number | undefined): Float32Array {
    const a = floats(name, "x", x);
    const [rows, n] = rowsOf(name, a, columns ?? weight?.length);
    const [w, b] = Object.entries({ weight, bias }).map(([what, each]) => (each === null ? null : floats(name, what, each, n)));
    return this.run(call, [a, w, b], [a.length], ([x, weight, bias], [out]) => ({ x, residual: 0, weight, bias, rows, n, eps, out }))[0];
  }

  softmax(x: Floats, { columns, scale = 1 }: { columns?: number; scale?: number } = {}): Float32Array {
    return this.runSoftmax("softmax", x, columns, scale, false);
  }
  logSoftmax(x: Floats, { columns, scale = 1 }: { columns?: number; scale?: number } = {}): Float32Array {
    return this.runSoftmax("logSoftmax", x, columns, scale, true);
  }
  private runSoftmax(name: string, x: Floats, columns: number | undefined, scale: number, log: boolean): Float32Array {
    const a = floats(name, "x", x);
    const [rows, n] = rowsOf(name, a, columns);
    number(name, "scale", scale, Number.isFinite, "a finite number");
    return this.run(opCalls.op_softmax, [a], [a.length], ([x], [out]) => ({ x, rows, n, scale, log: +log, out }))[0];
  }

  silu(x: Floats): Float32Array {
    return this.activate("silu", x);
  }
  gelu(x: Floats, { approximate = "none" }: { approximate?: "none" | "tanh" } = {}): Float32Array {
    if (approximate !== "none" && approximate !== "tanh") fail("gelu", "approximate", approximate, "none or tanh");
    return this.activate(approximate === "tanh" ? "gelu_tanh" : "gelu", x);
  }
  private activate(name: (typeof enums.activation)[number], x: Floats): Float32Array {
    const a = floats(name, "x", x);
    return this.run(opCalls.op_activate, [a], [a.length], ([x], [out]) => ({ activation: enums.activation.indexOf(name), x, n: a.length, out }))[0];
  }
  swiglu(gate: Floats, up: Floats): Float32Array {
    const g = floats("swiglu", "gate", gate);
    const u = floats("swiglu", "up", up, g.length);
    return this.run(opCalls.op_swiglu, [g, u], [g.length], ([gate, up], [out]) => ({ gate, up, n: g.length, out }))[0];
  }

  /** Return A x for a row-major A (m, x.length). */
  gemv(a: Floats, x: Floats): Float32Array {
    const by = floats("gemv", "x", x);
    const matrix = floats("gemv", "a", a);
    const [m, n] = rowsOf("gemv", matrix, size("gemv", "the length of x", by.length));
    return this.run(opCalls.op_gemv, [matrix, by], [m], ([a, x], [y]) => ({ a, m, n, x, y }))[0];
  }

  /** Attention of q (queries, heads, headDim) over k and v (keys, kvHeads, headDim); the last query is at the last key. */
  attention(q: Floats, k: Floats, v: Floats, options: AttentionOptions & { causal?: boolean }): Float32Array {
    const { causal = true, window, ...sizes } = options;
    if (window !== undefined && !causal) fail("attention", "window", window, "undefined if causal is false");
    const { given, heads, kvHeads, headDim, nQueries, nKeys, factor } = checkAttention("attention", q, k, v, { window, ...sizes });
    return this.run(opCalls.op_attention, given, [given[0].length], ([q, k, v], [out]) =>
      ({ q, k, v, nQueries, nKeys, nHeads: heads, nKvHeads: kvHeads, headDim, causal: +causal, window: window ?? 0, scale: factor, out }))[0];
  }

  /** Attention of one query (heads, headDim) over a cache's keys and values (keys, kvHeads, headDim): a decode step. */
  decodeAttention(q: Floats, k: Floats, v: Floats, options: AttentionOptions): Float32Array {
    const name = "decodeAttention";
    const { given, heads, kvHeads, headDim, nKeys, factor } = checkAttention(name, q, k, v, options);
    if (given[0].length !== heads * headDim) fail(name, "the length of q", given[0].length, `heads times headDim, ${heads * headDim}`);
    const first = Math.max(0, nKeys - (options.window ?? nKeys));
    return this.run(opCalls.op_decode_attention, given, [given[0].length], ([q, k, v], [out]) =>
      ({ q, k, v, first, nKeys, nHeads: heads, nKvHeads: kvHeads, headDim, scale: factor, out }))[0];
  }

  /** Rotate the first 2 invFreq.length elements of each head of x (positions, heads, headDim) by position * invFreq. */
  applyRope(
    positions: ArrayLike<number>, x: Floats, headDim: number, invFreq: Floats,
    { isNeox = true, attentionFactor = 1, inverse = false }: { isNeox?: boolean; attentionFactor?: number; inverse?: boolean } = {},
  ): Float32Array {
    const name = "applyRope";
    const a = floats(name, "x", x);
    const tokens = size(name, "the length of positions", positions?.length);
    const [rows] = rowsOf(name, a, size(name, "headDim", headDim));
    if (rows % tokens !== 0) throw new WhetError(`${name}: x has ${rows} heads, expected a multiple of the ${tokens} positions.`);
    const at = Int32Array.from(integers(name, "positions", positions, tokens, 2 ** 31));
    const frequencies = Float64Array.from(invFreq);
    if (frequencies.length < 1 || 2 * frequencies.length > headDim) fail(name, "the length of invFreq", frequencies.length, `from 1 to ${headDim / 2}`);
    return this.core.with([at, a, frequencies], (positions, x, invFreq) => {
      const flags = { isNeox: +isNeox, inverse: +inverse };
      opCalls.op_apply_rope(this.core, { positions, tokens, x, heads: rows / tokens, headDim, invFreq, rotaryDim: 2 * frequencies.length, scale: attentionFactor, ...flags });
      return this.core.floats(x, a.length);
    });
  }

  /** @internal */
  loraForward(x: Float32Array, y: Float32Array, a: Float32Array, b: Float32Array, rank: number, scale: number): Float32Array {
    const [n, m] = [a.length / rank, b.length / rank];
    return this.core.with([x, y, a, b], (input, output, down, up) => {
      opCalls.op_lora_forward(this.core, { x: input, y: output, rows: x.length / n, in: n, out: m, a: down, b: up, rank, scale });
      return this.core.floats(output, y.length);
    });
  }
  /** @internal */
  loraAccumulate(x: Float32Array, grad: Float32Array, a: Float32Array, b: Float32Array, rank: number, scale: number, sums: [Float32Array, Float32Array]): [Float32Array, Float32Array] {
    const [n, m] = [a.length / rank, b.length / rank];
    return this.core.with([x, grad, a, b, ...sums], (input, gradY, down, up, gradA, gradB) => {
      opCalls.op_lora_accumulate(this.core, { x: input, gradY, rows: x.length / n, in: n, out: m, a: down, b: up, rank, scale, gradA, gradB });
      return [this.core.floats(gradA, a.length), this.core.floats(gradB, b.length)];
    });
  }
  /** @internal */
  adamw(settings: { lr: number; beta1: number; beta2: number; eps: number; weightDecay: number; t: number }, arrays: Float32Array[]): Float32Array[] {
    return this.core.with(arrays, (...at) => {
      const [p, grad, m, v] = at;
      opCalls.op_adamw(this.core, { ...settings, gradScale: 1, n: arrays[0].length, p, grad, m, v });
      return at.map((from) => this.core.floats(from, arrays[0].length));
    });
  }
}

/** Trainable low-rank adapter of a linear layer: y += alpha / rank (x A^T) B, A (rank, in), B (rank, out). */
export class MicroLoRA {
  a: Float32Array;
  b: Float32Array;
  private gradientSums: [Float32Array, Float32Array];
  private nLosses = 0;
  private nSteps = 0;
  private moments: Float32Array[];

  /** Default A: uniform in (-1, 1) / sqrt(in). Default B: 0. */
  constructor(
    private readonly ops: Ops,
    readonly inFeatures: number,
    readonly outFeatures: number,
    readonly rank: number,
    { alpha = rank, a, b }: { alpha?: number; a?: Floats; b?: Floats } = {},
  ) {
    for (const [what, value] of Object.entries({ inFeatures, outFeatures, rank })) size("MicroLoRA", what, value);
    if (rank > MAX_RANK) fail("MicroLoRA", "rank", rank, `from 1 to ${MAX_RANK}`);
    this.scale = number("MicroLoRA", "alpha", alpha, Number.isFinite, "a finite number") / rank;
    const sample = () => (2 * Math.random() - 1) / Math.sqrt(inFeatures);
    this.a = floats("MicroLoRA", "a", a ?? Float32Array.from({ length: rank * inFeatures }, sample), rank * inFeatures).slice();
    this.b = floats("MicroLoRA", "b", b ?? new Float32Array(rank * outFeatures), rank * outFeatures).slice();
    this.gradientSums = [new Float32Array(this.a.length), new Float32Array(this.b.length)];
    this.moments = [this.a, this.b, this.a, this.b].map(({ length }) => new Float32Array(length));
  }
  readonly scale: number;

  /** Return y plus the adapter's delta for x (rows, in) and y (rows, out). */
  forward(x: Floats, y: Floats): Float32Array {
    const rows = floats("MicroLoRA.forward", "x", x);
    const [n] = rowsOf("MicroLoRA.forward", rows, this.inFeatures);
    return this.ops.loraForward(rows, floats("MicroLoRA.forward", "y", y, n * this.outFeatures), this.a, this.b, this.rank, this.scale);
  }

  /** Accumulate a loss's gradient from x (rows, in) and dL/dy (rows, out). */
  accumulate(x: Floats, gradY: Floats): void {
    const rows = floats("MicroLoRA.accumulate", "x", x);
    const [n] = rowsOf("MicroLoRA.accumulate", rows, this.inFeatures);
    const grad = floats("MicroLoRA.accumulate", "gradY", gradY, n * this.outFeatures);
    this.gradientSums = this.ops.loraAccumulate(rows, grad, this.a, this.b, this.rank, this.scale, this.gradientSums);
    ++this.nLosses;
  }

  zeroGrad(): void {
    for (const sum of this.gradientSums) sum.fill(0);
    this.nLosses = 0;
  }

  sgdStep(lr: number): void {
    const rate = Math.fround(number("MicroLoRA.sgdStep", "lr", lr, (x) => x >= 0 && x < Infinity, "a finite number >= 0"));
    const [gradA, gradB] = this.meanGradients("MicroLoRA.sgdStep");
    this.a = this.a.map((x, i) => x - Math.fround(rate * gradA[i]));
    this.b = this.b.map((x, i) => x - Math.fround(rate * gradB[i]));
    this.zeroGrad();
  }

  /** Apply a step of AdamW, as in torch.optim. */
  adamStep(lr: number, { betas = [0.9, 0.999], eps = 1e-8, weightDecay = 0 }: { betas?: [number, number]; eps?: number; weightDecay?: number } = {}): void {
    const name = "MicroLoRA.adamStep";
    for (const [what, value] of Object.entries({ lr, weightDecay })) number(name, what, value, (x) => x >= 0 && x < Infinity, "a finite number >= 0");
    for (const beta of betas) number(name, "betas", beta, (x) => x >= 0 && x < 1, "two numbers in [0, 1)");
    number(name, "eps", eps, (x) => x > 0 && x < Infinity, "a finite number above 0");
    const gradients = this.meanGradients(name);
    const settings = { lr, beta1: betas[0], beta2: betas[1], eps, weightDecay, t: ++this.nSteps };
    const [a, , mA, vA] = this.ops.adamw(settings, [this.a, gradients[0], this.moments[0], this.moments[2]]);
    const [b, , mB, vB] = this.ops.adamw(settings, [this.b, gradients[1], this.moments[1], this.moments[3]]);
    [this.a, this.b, this.moments] = [a, b, [mA, mB, vA, vB]];
    this.zeroGrad();
  }

  private meanGradients(name: string): Float32Array[] {
    if (this.nLosses === 0) throw new WhetError(`${name}: no gradient was accumulated. Call accumulate first.`);
    const means = this.gradientSums.map((sum) => sum.map((x) => x / this.nLosses));
    if (!means.every((mean) => mean.every(Number.isFinite))) throw new WhetError(`${name}: the gradient is not finite. Call zeroGrad and check the loss.`);
    return means;
  }
}
