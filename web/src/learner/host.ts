/** Learner in the engine's worker: low-rank adapters in the core's memory, their log-probs, gradients and AdamW.
 *
 * Factors are one array in the core's memory, A (rank, k) and B (rank, n) of each adapter in the order of whet.Learner; so are
 * their gradients and AdamW's two moments: 16 bytes per parameter. Products are float32. */
import type { Core } from "../core/core.js";
import { OutOfMemoryError, WhetError } from "../core/errors.js";
import { encode } from "../core/fields.js";
import { batchFields, enums, learnerCalls, opCalls } from "../facts.js";
import type { LoraFactors, ModuleLocation } from "../models/adapters.js";
import { type ModelConfig, slots } from "../models/architecture.js";
import { type FormatSpan, isFloatFormat, nameInSettings } from "../models/formats.js";
import { hfOrders, moveColumns } from "../models/orders.js";
import { packBatch, type Row } from "./batch.js";
import type { AdapterSettings, BaseRecord, Factors, LearnerInfo, LearnRequest, StepSettings } from "./protocol.js";
import { uniforms } from "./random.js";

const FLOAT_BYTES = 4;
const MB = 1e6;
/** Memory in which activations of layers are kept for the backward pass, which computes the other layers again. The memory of a
 * module never shrinks. */
const ACTIVATION_BYTES = 2 ** 28;

interface TrainedAdapter {
  module: string;
  location: ModuleLocation;
  n: number;
  k: number;
  /** Index of A among the factors. B follows. */
  at: number;
}

/** The model, packed in the core. */
export interface Base {
  core: Core;
  config: ModelConfig;
  modules: ReadonlyMap<string, ModuleLocation>;
  /** Formats of the matrices by slot. */
  formats: ReadonlyMap<string, FormatSpan[]>;
  /** The format that was asked for. */
  weights: string | undefined;
  /** File, folder or URL. */
  name: string;
  addAdapter(factors: LoraFactors[]): number;
  /** Remove an adapter, unless it was removed already. */
  removeAdapter(adapter: number): void;
}

type Block = "factors" | "gradients" | "first" | "second";

export class LearnerHost {
  private readonly blocks = new Map<Block, number>(); // addresses
  private readonly adapters: TrainedAdapter[] = [];
  private readonly nParameters: number;
  private synced: number | undefined; // the adapters' number in the engine
  /** Indices of the last log-probs among all completion tokens; undefined unless backward() may follow. */
  private places: number[] | undefined;
  private nTokens = 0; // of the last batch
  private nUpdates = 0;

  private readonly rank: number;
  private readonly alpha: number;

  /** `saved`: adapters to train further. */
  constructor(
    private readonly base: Base,
    settings: Omit<AdapterSettings, "files">,
    saved: readonly LoraFactors[] | undefined,
    where: string,
  ) {
    const { rank, scaling } = saved?.[0] ?? { ...settings, scaling: settings.alpha / settings.rank };
    [this.rank, this.alpha] = [rank, scaling * rank];
    const other = saved?.find((each) => each.rank !== rank || each.scaling !== scaling);
    if (other !== undefined) throw new WhetError(`${where}: the adapter of ${other.module} has another rank or alpha than the first. Train it natively, with whet.Learner.`);
    const values = new Map(saved?.map((factors) => [factors.module, factors]));
    const chosen = saved === undefined ? chooseModules(base.modules, settings.targets, where) : [...base.modules].filter(([module]) => values.has(module));
    let at = 0;
    for (const [module, location] of chosen) {
      const [n, k] = location.shape;
      if (rank > Math.max(n, k)) {
        throw new WhetError(`${where}: rank is ${rank}, and ${module} is ${n} x ${k}: the rank of its adapter is at most ${Math.max(n, k)}. Pass ${Math.max(n, k)}, or targets without it.`);
      }
      this.adapters.push({ module, location, n, k, at });
      at += rank * (n + k);
    }
    this.nParameters = at;
    try {
      this.guard(where, () => this.allocate(values, settings.seed));
    } catch (error) {
      this.close();
      throw (error as Error).name === "OutOfMemoryError" ? error : new WhetError(`${where}: ${(error as Error).message}. Load another model.`);
    }
  }

  get info(): LearnerInfo {
    const formats = [...this.base.formats.values()].flat();
    return { nParameters: this.nParameters, alpha: this.alpha, model: this.base.name, isQuantised: !formats.every(({ format }) => isFloatFormat(format)) };
  }

  /** Run an action, which the methods of Learner document. */
  run({ action, given, where }: LearnRequest): unknown {
    switch (action) {
      case "logprobs": return this.logprobs(given.rows, given.temperature, given.adapters, given.keep, where);
      case "backward": return this.backward(given, where);
      case "zeroGrad": return this.clear("gradients");
      case "step": return this.step(given, where);
      case "sync": return this.guard(where, () => this.sync());
      case "gradients": return this.read("gradients");
      case "save": return this.record().then((record) => ({ factors: this.read("factors"), targetModules: this.targetModules(), record }));
      case "close": return this.close();
    }
  }

  private get core(): Core {
    return this.base.core;
  }

  /** Allocate the factors: the given ones, else A at random and B zero. */
  private allocate(saved: ReadonlyMap<string, LoraFactors>, seed: bigint): void {
    const { core, rank } = this;
    core.call("begin_learner");
    for (const { location, n } of this.adapters) {
      learnerCalls.add_learner_adapter(core, { layer: location.layer, target: enums.target.indexOf(location.target!), firstRow: location.firstRow, n, rank });
    }
    for (const block of ["factors", "gradients"] as const) this.clear(block);
    const draw = uniforms(seed);
    const factors = this.view("factors");
    for (const { module, at, n, k } of this.adapters) {
      const bound = 1 / Math.sqrt(k); // as PEFT: Kaiming uniform with a = sqrt(5)
      const given = saved.get(module);
      for (let i = 0; i < rank * k; ++i) factors[at + i] = given?.a[i] ?? -bound + 2 * bound * draw();
      for (const [i, x] of given?.b.entries() ?? []) factors[at + rank * k + (i % rank) * n + Math.floor(i / rank)] = x;
    }
    this.update();
  }

  /** Return a block in place, allocated on first use. */
  private view(block: Block): Float32Array {
    if (!this.blocks.has(block)) this.blocks.set(block, this.core.allocate(this.nParameters * FLOAT_BYTES));
    return this.core.view(this.blocks.get(block)!, this.nParameters);
  }

  private clear(block: Block): void {
    this.view(block).fill(0);
  }

  /** Pack the factors for the next log-probs. */
  private update(): void {
    this.core.call("set_factors", this.blocks.get("factors")!, this.scaling);
  }

  private get scaling(): number {
    return this.alpha / this.rank;
  }

  /** Report the sizes if the core is out of memory; the learner stays usable. */
  private guard<T>(where: string, run: () => T): T {
    try {
      return run();
    } catch (error) {
      if ((error as Error).name !== "OutOfMemoryError") throw error; // of this class in another chunk
      const { memoryBytes, maxBytes } = this.core;
      const use = `the adapters take ${Math.ceil((4 * FLOAT_BYTES * this.nParameters) / MB)} MB to train` + (this.nTokens > 0 ? `, and the batch has ${this.nTokens} tokens` : "");
      throw new OutOfMemoryError(`${where}: out of memory at ${Math.round(memoryBytes / MB)} MB of ${Math.round(maxBytes / MB)} MB: ${use}. Pass fewer or shorter rows, a smaller maxTokensPerStep or rank, or load the model with smaller kvBytes.`);
    }
  }

  /** Return the log-probs of all completion tokens, row after row. `keep`: whether backward() follows. */
  private logprobs(rows: readonly Row[], temperature: number, withAdapters: boolean, keep: boolean, where: string): Float32Array {
    this.places = undefined;
    const { places, ...batch } = packBatch(rows);
    this.nTokens = batch.tokens.length;
    const packed = this.guard(where, () => {
      const activationBytes = Math.floor(Math.min(ACTIVATION_BYTES, (this.core.maxBytes - this.core.memoryBytes) / 2));
      const numbers = encode(batchFields, { ...batch, temperature, withAdapters, keep, activationBytes });
      return this.core.with([numbers, new Float32Array(places.length)], (at, out) => {
        this.core.call("learner_forward", at, numbers.length, out);
        return this.core.floats(out, places.length);
      });
    });
    if (keep && withAdapters) this.places = places;
    const found = new Float32Array(places.length);
    for (const [i, place] of places.entries()) found[place] = packed[i];
    return found;
  }

  /** Add to the gradients of the factors, from the gradients of the last log-probs. */
  private backward(gradient: Float32Array, where: string): void {
    const { places } = this;
    if (places === undefined) throw new WhetError(`${where}: it follows logprobs() with adapters, once. Call logprobs() first.`);
    if (gradient.length !== places.length) throw new WhetError(`${where}: gradients have ${gradient.length} numbers, expected ${places.length}, one for each log-prob.`);
    this.places = undefined;
    const packed = Float32Array.from(places, (place) => gradient[place]);
    this.guard(where, () => this.core.with([packed], (at) => this.core.call("learner_backward", at, packed.length, this.blocks.get("gradients")!)));
  }

  /** Update the factors by AdamW, set the gradients to zero, and return their 2-norm. */
  private step({ learningRate, adamBeta1, adamBeta2, adamEpsilon, weightDecay, maxGradNorm }: StepSettings, where: string): number {
    const norm = Math.sqrt(this.view("gradients").reduce((sum, x) => sum + x * x, 0));
    if (!Number.isFinite(norm)) throw new WhetError(`${where}: the gradients contain NaN or infinity. Call zeroGrad() and check the loss.`);
    this.guard(where, () => {
      for (const block of ["first", "second"] as const) if (!this.blocks.has(block)) this.clear(block);
    });
    const [p, grad, m, v] = (["factors", "gradients", "first", "second"] as const).map((block) => this.blocks.get(block)!);
    const gradScale = maxGradNorm === 0 ? 1 : Math.min(1, maxGradNorm / (norm + 1e-6));
    opCalls.op_adamw(this.core, { lr: learningRate, beta1: adamBeta1, beta2: adamBeta2, eps: adamEpsilon, weightDecay, t: ++this.nUpdates, gradScale, n: this.nParameters, p, grad, m, v });
    this.clear("gradients");
    this.update();
    return norm;
  }

  /** Return the factors, or their gradients, by module. */
  private read(block: "factors" | "gradients"): Map<string, Factors> {
    const { rank } = this;
    const values = this.view(block);
    return new Map(
      this.adapters.map(({ module, location, n, k, at }) => {
        const b = new Float32Array(n * rank);
        const stored = values.subarray(at + rank * k, at + rank * (k + n)); // (rank, n), columns in the order of the slot
        for (const [to, from, count] of hfOrders[location.order](this.base.config, n)) {
          for (let i = 0; i < count; ++i) for (let r = 0; r < rank; ++r) b[(from + i) * rank + r] = stored[r * n + to + i];
        }
        const a = moveColumns(values.subarray(at, at + rank * k), k, hfOrders[location.columnOrder](this.base.config, k), true);
        return [module, { rank, a, b }];
      }),
    );
  }

  /** Replace the adapters' copy in the engine, and return its number. */
  private sync(): number {
    const { rank } = this;
    const values = this.view("factors");
    const factors = this.adapters.map(({ module, location, n, k, at }) => ({
      module,
      layer: location.layer,
      target: location.target!,
      firstRow: location.firstRow,
      rank,
      a: values.slice(at, at + rank * k),
      b: Float32Array.from({ length: n * rank }, (_, i) => values[at + rank * k + (i % rank) * n + Math.floor(i / rank)]),
      scaling: this.scaling,
    }));
    if (this.synced !== undefined) this.base.removeAdapter(this.synced);
    this.synced = undefined;
    return (this.synced = this.base.addAdapter(factors));
  }

  /** Return PEFT's target_modules: the last parts of the adapted modules' names, unless another module of the model has them. */
  private targetModules(): string[] {
    const adapted = new Set(this.adapters.map(({ module }) => module));
    const ends = new Set([...adapted].map(lastPart));
    const isShared = [...this.base.modules.keys()].some((name) => !adapted.has(name) && ends.has(lastPart(name)));
    return [...(isShared ? adapted : ends)].sort();
  }

  /** Return PackedBase.record of Python, by which native Whet recognises the base. */
  private async record(): Promise<BaseRecord> {
    const { core, config, formats, weights } = this.base;
    const lines = [...slots(config).keys()].map((slot) => {
      core.withText(slot, (at, n) => core.call("slot_checksum", at, n));
      const names = new Set((formats.get(slot) ?? [{ format: "float32" }]).map(({ format }) => format));
      return `${slot} ${[...names].join(", ")} ${core.result()}`;
    });
    const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(lines.join("\n")));
    return {
      weights: weights ?? null,
      embedding: null,
      head: null,
      formats: [...new Set([...formats.values()].flat().map(({ format }) => nameInSettings(format)))].join(", "),
      is_quantised: this.info.isQuantised,
      digest: Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join(""),
    };
  }

  /** Free the memory. */
  close(): void {
    for (const at of this.blocks.values()) this.core.release(at);
    this.blocks.clear();
    this.core.call("end_learner");
  }
}

const lastPart = (name: string) => name.slice(name.lastIndexOf(".") + 1);

/** Return the modules to adapt, in the model's order. */
function chooseModules(modules: ReadonlyMap<string, ModuleLocation>, targets: readonly string[], where: string): [string, ModuleLocation][] {
  const endsWith = ({ names }: ModuleLocation, target: string) => names.some((name) => `.${name}`.endsWith(`.${target}`));
  const learnable = [...modules].filter(([, { target }]) => target !== undefined);
  const unknown = targets.find((target) => !learnable.some(([, location]) => endsWith(location, target)));
  if (unknown !== undefined) {
    const known = new Set(learnable.map(([name]) => lastPart(name)));
    throw new WhetError(`${where}: targets has "${unknown}", expected linear layers of this model: ${[...known].join(", ")}.`);
  }
  return learnable.filter(([, location]) => (targets.length === 0 ? location.isAdapted : targets.some((target) => endsWith(location, target))));
}
