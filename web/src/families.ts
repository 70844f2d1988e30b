/** Hugging Face's model families: the config of a model, as its config.json says it, as the engine's.
 *
 * The tables are whet.models.families', and so are the rules. (gguf.ts reads metadata by itself: a page with GGUF files
 * does not download this.) */
import type { Core } from "./core.js";
import { WhetError } from "./errors.js";
import { activations, largest, largestSize, notRun, plain as PLAIN } from "./facts.js";
import { FAMILIES, type Family, type ModelConfig, toCamel } from "./model.js";
import { ropeFrequencies } from "./rope.js";
import { show } from "./sampling.js";

/** The options of a model in the words of its config.json. */
export type Given = Readonly<Record<string, unknown>>;

/** Words for what keeps the engine from a model_type or an architecture. */
const whyNot = (name: unknown) => {
  const [, what] = Object.entries(notRun).find(([key]) => key === name) ?? [];
  return what === undefined ? "" : `, which has ${what}`;
};

export function familyOf(given: Given, where: string): Family {
  const name = given.model_type;
  if (typeof name !== "string" || !Object.hasOwn(FAMILIES, name)) {
    throw new WhetError(`${where}: model_type is ${show(name)}${whyNot(name)}; this engine runs ${Object.keys(FAMILIES).sort().join(", ")}.`);
  }
  return FAMILIES[name];
}

/** Tokens of the longest sequence that the model was trained for. */
export const trainedPosition = (given: Given, where: string) => new Options(given, familyOf(given, where), where).size("max_position");

const isObject = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null && !Array.isArray(value);

/** The options under either name, with the family's defaults, checked. */
class Options {
  constructor(
    readonly given: Given,
    readonly family: Family,
    readonly where: string,
  ) {}

  get(name: string): unknown {
    const key = this.family.keys[name] ?? name;
    return key in this.given ? this.given[key] : this.family.defaults[name];
  }

  wrong(name: string, expected: string): WhetError {
    return new WhetError(`${this.where}: ${this.family.keys[name] ?? name} is ${show(this.get(name))}, expected ${expected}.`);
  }

  refuse(): void {
    for (const [name, values] of Object.entries(PLAIN as unknown as Record<string, unknown[]>)) {
      const value = this.given[name];
      const isOwn = Object.values(this.family.keys).includes(name);
      if (value !== undefined && !isOwn && !values.some((plain) => JSON.stringify(plain) === JSON.stringify(value))) {
        throw new WhetError(`${this.where}: ${name} is ${show(value)}, which the engine does not run for ${this.given.model_type}; expected ${show(values.at(-1))}.`);
      }
    }
  }

  size(name: string, otherwise?: number): number {
    const value = (name in this.family.keys || name === "vocab_size" ? this.get(name) : undefined) ?? otherwise;
    const highest = (largest as Record<string, number>)[name] ?? largestSize;
    if (!isCount(value, 1) || value > highest) throw this.wrong(name, `an integer from 1 to ${highest}`);
    return value;
  }

  count(name: string, least: number): number {
    const value = this.get(name);
    if (!isCount(value, least)) throw this.wrong(name, `an integer of at least ${least}`);
    return value;
  }

  number(name: string): number {
    const value = this.get(name);
    if (typeof value !== "number" || !Number.isFinite(value)) throw this.wrong(name, "a finite number");
    return value;
  }

  /** A factor that only some families have. */
  scale(name: string, plain = 1): number {
    if (!(name in this.family.keys)) return plain;
    const value = this.number(name);
    if (!(value > 0)) throw this.wrong(name, "a number above 0");
    return value;
  }

  /** A cap that only some families have; 0: none. */
  softcap(name: string): number {
    if (!(name in this.family.keys) || (this.get(name) ?? null) === null) return 0;
    const value = this.number(name);
    if (!(value > 1e-6 && value < 1e6)) throw this.wrong(name, "a number from 1e-6 to 1e6, or null");
    return value;
  }

  flag(name: string): boolean {
    const value = this.get(name) ?? false;
    if (typeof value !== "boolean") throw this.wrong(name, "true or false");
    return value;
  }

  activation(): ModelConfig["activation"] {
    const [, found] = Object.entries(activations).find(([name]) => name === this.get("activation")) ?? [];
    if (found === undefined) throw this.wrong("activation", `one of ${Object.keys(activations).join(", ")}`);
    return found;
  }

  ropeLayers(nLayers: number): boolean[] {
    if (!this.family.rope_off) return [];
    const given = this.get("no_rope_layers") ?? undefined;
    if (given === undefined) {
      const interval = this.count("no_rope_layer_interval", 1);
      return Array.from({ length: nLayers }, (_, i) => (i + 1) % interval !== 0);
    }
    if (!Array.isArray(given) || given.length < nLayers || !given.every((each) => each === 0 || each === 1)) throw this.wrong("no_rope_layers", `a 0 or 1 for each of ${nLayers} layers`);
    return given.slice(0, nLayers).map(Boolean);
  }

  windows(nLayers: number, length: number): number[] {
    const { window: kind } = this.family;
    const isSaid = kind !== "none" && (kind !== "some" || this.flag("use_sliding_window")) && (this.get("sliding_window") ?? null) !== null;
    let window = isSaid ? this.count("sliding_window", 1) : 0;
    if (window >= length) window = 0; // the same as none, and cheaper
    let isLocal: (i: number) => boolean = () => true;
    if (kind === "pattern") {
      const layers = this.localLayers(nLayers);
      isLocal = (i) => layers[i];
    } else if (kind === "some" && window > 0) {
      const layers = this.kinds(nLayers);
      const full = layers === undefined ? this.count("max_window_layers", 0) : 0;
      isLocal = (i) => layers?.[i] ?? i >= full;
    }
    return Array.from({ length: nLayers }, (_, i) => (isLocal(i) ? window : 0));
  }

  /** Whether each layer attends in a window, by its layer_types. */
  private kinds(nLayers: number): boolean[] | undefined {
    const kinds = this.get("layer_types") ?? undefined;
    if (kinds === undefined) return undefined;
    const known = ["full_attention", "sliding_attention"];
    if (!Array.isArray(kinds) || kinds.length !== nLayers || !kinds.every((kind) => known.includes(kind))) throw this.wrong("layer_types", `${nLayers} of ${known.join(" and ")}`);
    return kinds.map((kind) => kind === known[1]);
  }

  /** The same, where without layer_types all but every sliding_window_pattern-th do. */
  localLayers(nLayers: number): boolean[] {
    const kinds = this.kinds(nLayers);
    if (kinds !== undefined) return kinds;
    const pattern = this.count("sliding_window_pattern", 1);
    return Array.from({ length: nLayers }, (_, i) => (i + 1) % pattern !== 0);
  }

  /** The settings of rotary embedding: rope_parameters, or what older configs say in several places. */
  rope(trained: number): Record<string, unknown> {
    const { family } = this;
    let given = this.get("rope_parameters") || this.get("rope_scaling") || {};
    if (family.rope_local && isObject(given)) given = given.full_attention ?? ("sliding_attention" in given ? {} : given);
    if (!isObject(given) || Object.values(given).some(isObject)) throw new WhetError(`${this.where}: rope_parameters is ${show(given)}, expected one object of settings for all layers.`);
    const scaling: Record<string, unknown> = Object.fromEntries(Object.entries(given).filter(([, value]) => value !== null));
    let kind = (scaling.rope_type ??= scaling.type ?? "default");
    if (kind === "su" || (kind === "yarn" && this.given.model_type === "phi3")) kind = scaling.rope_type = "longrope";
    const names = { rope_theta: ["rope_theta", "rotary_emb_base"], partial_rotary_factor: family.partial_rotary ? ["partial_rotary_factor", "rotary_pct"] : [] };
    for (const [key, places] of Object.entries(names)) {
      const found = places.map((name) => this.get(name)).find((value) => (value ?? null) !== null);
      if (found !== undefined) scaling[key] ??= found;
    }
    if (!family.partial_rotary && kind !== "proportional") {
      const partial = scaling.partial_rotary_factor ?? 1;
      delete scaling.partial_rotary_factor;
      if (partial !== 1 && kind !== "default") {
        throw new WhetError(`${this.where}: partial_rotary_factor is ${show(partial)} with rope_type ${show(kind)}, and a ${this.given.model_type} rotates whole heads. Leave it out.`);
      }
    }
    const original = "original_max_position_embeddings";
    if (kind === "llama3" || kind === "yarn" || kind === "longrope") {
      scaling[original] = this.get(original) ?? scaling[original] ?? trained;
      if (kind !== "llama3" && typeof scaling[original] === "number" && scaling[original] > 0) scaling.factor ??= trained / scaling[original];
    } else if (kind === "dynamic") scaling[original] = trained;
    else delete scaling[original];
    return scaling;
  }
}

const isCount = (value: unknown, least: number): value is number => Number.isInteger(value) && (value as number) >= least;

/**
 * The engine's config of a model.
 *
 * @param length tokens of the longest sequence, for which frequencies are resolved; as trained where it is left out.
 * @param tiedHead whether the head is the embedding; as the options say where it is left out.
 */
export function modelConfig(core: Core, given: Given, where: string, length?: number, tiedHead?: boolean): ModelConfig {
  const family = familyOf(given, where);
  const options = new Options(given, family, where);
  options.refuse();
  const [nLayers, nHeads, hiddenDim] = ["n_layers", "n_heads", "hidden_dim"].map((name) => options.size(name));
  const nKvHeads = options.size("n_kv_heads", nHeads);
  const headDim = options.size("head_dim", Math.trunc(hiddenDim / nHeads));
  const isSaid = "head_dim" in family.keys && (options.get("head_dim") ?? null) !== null;
  if (!isSaid && hiddenDim % nHeads !== 0) throw options.wrong("hidden_dim", `a multiple of ${family.keys.n_heads}=${nHeads}`);
  if (nHeads % nKvHeads !== 0) throw options.wrong("n_heads", `a multiple of ${family.keys.n_kv_heads}=${nKvHeads}`);
  const trained = options.size("max_position");
  const maxPosition = length ?? trained;
  if (family.rope === "none" && maxPosition > trained) throw new WhetError(`${where}: contextLength is ${maxPosition}, and the model has ${trained} positions.`);
  let attentionScale = options.get("scale_attn_weights") === false ? 1 : 1 / Math.sqrt(headDim);
  if ("query_pre_attn_scalar" in family.defaults) attentionScale = core.call("power", options.number("query_pre_attn_scalar"), -0.5);
  const settings: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(family.settings)) {
    settings[toCamel(name)] = typeof value === "string" && value.startsWith("@") ? options.flag(value.slice(1)) : value;
  }
  return {
    nLayers, nHeads, nKvHeads, headDim, hiddenDim, maxPosition,
    ffnDim: options.size("ffn_dim", family.keys.ffn_dim === "n_inner" ? 4 * hiddenDim : undefined),
    vocabSize: options.size("vocab_size"),
    norm: "rms",
    normEps: options.number("norm_eps"),
    windows: options.windows(nLayers, maxPosition),
    attentionScale: options.scale("attention_scale", attentionScale),
    attentionSoftcap: options.softcap("attention_softcap"),
    embeddingScale: options.scale("embedding_scale", family.root_of_embedding ? Math.sqrt(hiddenDim) : 1),
    residualScale: options.scale("residual_scale"),
    logitsScale: 1 / options.scale("logits_divisor"),
    logitsSoftcap: options.softcap("logits_softcap"),
    learnedPositions: family.rope === "none" ? trained : 0,
    preNorm: true, postNorm: false, qkNorm: false, qkNormWhole: false, parallelResidual: false, sharedNorm: false,
    activation: options.activation(),
    gated: true,
    tiedHead: tiedHead ?? options.flag("tie_word_embeddings"),
    qkvBias: false, oBias: false, mlpBias: false, headBias: false,
    ropeLayers: options.ropeLayers(nLayers),
    ...rotary(core, options, headDim, maxPosition, trained),
    ...localRotary(core, options, nLayers, headDim, maxPosition),
    ...settings,
  };
}

function rotary(core: Core, options: Options, headDim: number, length: number, trained: number): Pick<ModelConfig, "rotaryDim" | "isNeox" | "invFreq" | "attentionFactor"> {
  const { rope } = options.family;
  if (rope === "none") return { rotaryDim: 0, isNeox: true, invFreq: [], attentionFactor: 1 };
  const isNeox = rope === "neox";
  const found = ropeFrequencies(core, headDim, isNeox ? undefined : options.count("rotary_dim", 2), length, isNeox ? options.rope(trained) : {}, options.where);
  return { rotaryDim: 2 * found.invFreq.length, isNeox, ...found };
}

/** Of layers that rotate by frequencies of their own. */
function localRotary(core: Core, options: Options, nLayers: number, headDim: number, length: number): Pick<ModelConfig, "localLayers" | "localInvFreq"> {
  const none = { localLayers: [], localInvFreq: [] };
  if (!options.family.rope_local) return none;
  const given = options.get("rope_parameters");
  const local = (isObject(given) && given.sliding_attention) || { rope_theta: options.get("rope_local_base_freq") };
  if (!isObject(local) || (local.rope_type ?? "default") !== "default") throw options.wrong("rope_parameters", "plain frequencies of sliding_attention, without scaling");
  const localLayers = options.localLayers(nLayers);
  if (!localLayers.includes(true)) return none;
  return { localLayers, localInvFreq: ropeFrequencies(core, headDim, undefined, length, { rope_theta: local.rope_theta }, options.where).invFreq };
}
